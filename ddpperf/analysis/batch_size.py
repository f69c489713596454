"""The largest batch size that fits into memory, and the workers that load images fast enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

FACTOR = 4
RESOLUTION = 1 / 16  # the search ends when the sizes differ by this fraction
MOST = 2**30
LEAST_FRACTION = 0.05  # loading below this fraction of an epoch is negligible


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


def enough_workers(fractions: Mapping[int, float]) -> int | None:
    """Return the fewest data loader workers that keep image loading below 5% of an epoch.

    With this number and all greater ones, loading takes less than `LEAST_FRACTION` of an epoch. The
    keys of `fractions` are numbers of workers. Returns None if no number is enough.
    """
    descending = sorted(fractions, reverse=True)
    enough = list(takewhile(lambda workers: fractions[workers] < LEAST_FRACTION, descending))
    return enough[-1] if enough else None
