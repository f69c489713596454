"""The search for the largest batch size that fits into memory, with few trials."""

from __future__ import annotations

from collections.abc import Callable

FACTOR = 4
RESOLUTION = 1 / 16  # the search ends when the sizes differ by this fraction
MOST = 2**30


def largest_that_fits(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest batch size that fits into memory, or 0 if `first` does not fit.

    The result is exact to `RESOLUTION`. Sizes grow from `first` by `FACTOR` until a size does not
    fit. Then the interval is halved. No size is tried twice.
    """
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
