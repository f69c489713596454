"""The fraction of an epoch that training waits for its images."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

LEAST_FRACTION = 0.05  # loading below this fraction of an epoch is negligible


def loading_fraction(with_loading: float, without: float) -> float:
    """Return the fraction of an epoch spent waiting for images, 1 - without / with_loading.

    The result is below 0 where noise exceeds the cost of loading.
    """
    return 1 - without / with_loading


def enough_workers(fractions: Mapping[int, float]) -> int | None:
    """Return the fewest data loader workers that keep image loading below 5% of an epoch.

    With this number and all greater ones, loading takes less than `LEAST_FRACTION` of an epoch. The
    keys of `fractions` are numbers of workers. Returns None if no number is enough.
    """
    descending = sorted(fractions, reverse=True)
    enough = list(takewhile(lambda workers: fractions[workers] < LEAST_FRACTION, descending))
    return enough[-1] if enough else None
