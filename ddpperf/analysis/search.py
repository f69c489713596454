"""The largest of many sizes, by trying few."""

from __future__ import annotations

from collections.abc import Callable

FACTOR = 4
RESOLUTION = 1 / 16  # how much more than what fits need not be tried
MOST = 2**30


def largest_that_fits(fits: Callable[[int], bool], first: int) -> int:
    """From `first` on FACTOR-fold until one does not fit, then halfway between the two, until they differ by RESOLUTION; each
    is tried once. If not even the first fits, 0."""
    low, high = 0, first
    while high <= MOST and fits(high):
        low, high = high, high * FACTOR
    if high > MOST or not low:
        return low
    while high - low > max(1, int(low * RESOLUTION)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
