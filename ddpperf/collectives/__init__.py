"""Collectives: all-reduce algorithms, the transports below them, and the measured calls."""
