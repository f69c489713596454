"""Speedup and efficiency from t(N), the slowest rank's seconds of a step on N devices."""

from __future__ import annotations


def weak_speedup(t1: float, tN: float, N: int) -> float:
    """Return the weak-scaling speedup N * t(1) / t(N) for a constant batch per rank.

    The formula is from Gustafson (1988).
    """
    _require_positive(t1, tN, N)
    return N * t1 / tN


def strong_speedup(t1: float, tN: float, N: int) -> float:
    """Return the strong-scaling speedup t(1) / t(N) for a constant global batch.

    The formula is from Amdahl (1967).
    """
    _require_positive(t1, tN, N)
    return t1 / tN


def efficiency(speedup: float, N: int) -> float:
    """Return the parallel efficiency, speedup / N."""
    _require_positive(speedup, speedup, N)
    return speedup / N


def _require_positive(first: float, second: float, N: int) -> None:
    if not (first > 0 and second > 0 and N >= 1):
        raise ValueError(
            f"a speedup needs positive times and a world size of at least 1, got {first}, {second}, {N}"
        )
