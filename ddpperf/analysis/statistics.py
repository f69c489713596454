"""Summaries of durations that a few slow rounds do not move."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

FEWEST_ROUNDS = 4  # for a spread


def relative_iqr(values: Sequence[float]) -> float:
    """The interquartile range as a fraction of the median: the spread of the middle half; at least two values."""
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / median(values)
