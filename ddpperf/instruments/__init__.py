"""Clocks, profiler traces and message counters that measure a training step without changing it."""
