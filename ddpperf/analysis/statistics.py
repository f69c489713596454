"""Summaries of durations that a few slow rounds do not move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def median(values: Sequence[float]) -> float:
    """The middle value; raises ValueError for none."""
    if not values:
        raise ValueError("the median of no values was asked for; measure at least one round")
    return float(np.median(values))


def relative_iqr(values: Sequence[float]) -> float:
    """The interquartile range as a fraction of the median: the spread of the middle half of the rounds."""
    lower, upper = np.percentile(values, [25, 75])
    return float((upper - lower) / median(values))
