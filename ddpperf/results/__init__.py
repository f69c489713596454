"""Measurements, metrics and outcomes of tests, and the files that store them."""
