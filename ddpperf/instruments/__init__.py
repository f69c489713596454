"""Measure what happens inside a training step: traces, parts, messages, replays of buckets, kernels."""
