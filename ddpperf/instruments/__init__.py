"""Clocks, traces and counters that look at a step and change nothing."""
