"""What loading images costs an epoch, against the same epoch without it."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_SHARE = 0.05  # of an epoch, from which on loading limits it


def loading_share(with_loading: float, without: float) -> float:
    """1 - without / with_loading, from two epochs' seconds: the share of an epoch that is spent waiting for its images.

    Below 0 where noise exceeds what loading costs.
    """
    if not (with_loading > 0 and without > 0):
        raise ValueError(
            f"a share of loading needs positive times, got {with_loading} s with and {without} s without it"
        )
    return 1 - without / with_loading


def enough_workers(shares: Mapping[int, float]) -> int | None:
    """The number of workers from which on loading takes less than `LEAST_SHARE` of an epoch; None if none is enough.

    shares: by number of workers, the share of loading.
    """
    enough = None
    for workers in sorted(shares, reverse=True):
        if shares[workers] >= LEAST_SHARE:
            break
        enough = workers
    return enough
