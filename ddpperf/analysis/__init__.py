"""Arithmetic on times and sizes: scaling, bandwidth, cost models, statistics."""
