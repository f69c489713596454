"""Timers, profiler traces and message counters for training steps."""
