"""The fraction of an epoch that loading takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.batch_size import LEAST_FRACTION, enough_workers, loading_fraction
from tests.generated import BOUNDED, seconds

shares = st.dictionaries(st.integers(0, 64), st.floats(-1, 1))


@pytest.mark.parametrize(
    ("with_loading", "without", "share"),
    [(10.0, 8.0, 0.2), (1.0, 1.0, 0.0), (4.0, 1.0, 0.75), (1.0, 1.25, -0.25)],
)
def test_the_share_is_of_the_epoch_with_loading(with_loading: float, without: float, share: float) -> None:
    assert loading_fraction(with_loading, without) == pytest.approx(share)


@BOUNDED
@given(seconds, seconds)
def test_loading_fraction_is_of_the_longer_epoch(without: float, loading: float) -> None:
    share = loading_fraction(without + loading, without)
    assert 0 <= share < 1
    assert share * (without + loading) == pytest.approx(loading, rel=1e-6, abs=1e-9 * (without + loading))


@pytest.mark.parametrize(
    ("by_workers", "enough"),
    [
        ({0: 0.5, 1: 0.2, 2: 0.04, 4: 0.01}, 2),
        ({4: 0.01, 2: 0.04, 1: 0.2, 0: 0.5}, 2),  # in whichever order they were measured
        ({0: -0.01, 8: 0.0}, 0),
        ({0: 0.2, 1: 0.04, 2: 0.11, 4: 0.09, 8: 0.02}, 8),  # one lucky count is not enough
        ({0: 0.5, 8: LEAST_FRACTION}, None),  # a share from which on loading limits
        ({}, None),
    ],
)
def test_enough_is_the_fewest_sufficient_workers(by_workers: dict[int, float], enough: int | None) -> None:
    assert enough_workers(by_workers) == enough


@BOUNDED
@given(shares)
def test_fewer_than_enough_workers_are_insufficient(
    by_workers: dict[int, float],
) -> None:
    enough = enough_workers(by_workers)
    assert all(
        share < LEAST_FRACTION
        for workers, share in by_workers.items()
        if enough is not None and workers >= enough
    )
    fewer = [workers for workers in by_workers if enough is None or workers < enough]
    assert not fewer or by_workers[max(fewer)] >= LEAST_FRACTION
