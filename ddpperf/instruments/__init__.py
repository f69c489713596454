"""Look at training steps from above: traces, parts, messages, replays of buckets, kernels."""
