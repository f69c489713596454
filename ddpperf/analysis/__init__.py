"""Arithmetic on seconds and bytes: scaling, bandwidth, cost models, statistics."""
