"""The cost model with a link inside the nodes and one between them, and its fit."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from ddpperf.analysis.cost_models import counts
from ddpperf.analysis.logarithmic_fit import Undetermined
from ddpperf.analysis.node_cost_model import Load, fit_two_links, two_link_counts, two_links_and_error
from ddpperf.specs import Algorithm, AllReduceSpec

KiB, MiB = 2**10, 2**20
SIZES = (KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB)
INSIDE, NETWORK = (30e-6, 1 / 3e9), (2e-3, 1 / 125e6)  # seconds of an empty message, and per byte
SERIES: tuple[tuple[Algorithm, int, tuple[int, ...]], ...] = (
    ("ring", 0, (2, 4, 6)),
    ("hierarchical", 2, (4, 6)),
)
# Flat and hierarchical all-reduces on one node and on 2 and 3 nodes of 2 ranks.
CALLS = [
    AllReduceSpec(algorithm=algorithm, world_size=N, node_size=node_size, nbytes=nbytes)
    for algorithm, node_size, sizes in SERIES
    for N in sizes
    for nbytes in SIZES
]
ONE_RANK_PER_NODE = [
    AllReduceSpec(algorithm="ring", world_size=N, nbytes=nbytes) for N in (2, 3) for nbytes in SIZES
]


def times(
    calls: list[AllReduceSpec], noise: float = 0.0, seed: int = 0, node_size: int = 2
) -> dict[AllReduceSpec, float]:
    drawn = random.Random(seed)
    found = {}
    for call in calls:
        loads = two_link_counts(call.algorithm, call.world_size, node_size, call.nbytes)
        seconds = sum(
            load.messages * latency + load.volume * call.nbytes * byte_seconds
            for load, (latency, byte_seconds) in zip(loads, (INSIDE, NETWORK), strict=True)
        )
        found[call] = seconds * drawn.lognormvariate(0, noise)
    return found


def test_each_algorithm_loads_its_links() -> None:
    ring = two_link_counts("ring", 6, 2, 64 * KiB)
    assert ring == (Load(), Load(messages=10, volume=10 / 6))
    hierarchical = two_link_counts("hierarchical", 12, 4, 64 * KiB)
    assert hierarchical == (Load(messages=6, volume=6 / 4), Load(messages=4, volume=4 / 3))
    in_pieces = two_link_counts("hierarchical", 12, 4, 16 * MiB)
    assert in_pieces[1].messages == 1, "sending hides all latencies between nodes but one"
    for algorithm in ("ring", "tree", "halving_doubling"):
        one_link = counts(algorithm, 4, 16 * MiB)
        on_a_node = two_link_counts(algorithm, 4, 8, 16 * MiB)
        assert on_a_node == (Load(messages=one_link.latency, volume=one_link.volume), Load())
    with pytest.raises(ValueError, match="halving_doubling has no cost model for several nodes"):
        two_link_counts("halving_doubling", 4, 2)


def test_both_links_are_fitted() -> None:
    found = fit_two_links(times(CALLS), 2)
    assert found.inside is not None
    for fitted, (latency, byte_seconds) in ((found.inside, INSIDE), (found.between, NETWORK)):
        assert fitted.latency.value == pytest.approx(latency, rel=1e-4)
        assert fitted.byte_seconds.value == pytest.approx(byte_seconds, rel=1e-4)
    unseen = AllReduceSpec(algorithm="hierarchical", world_size=8, node_size=2, nbytes=2 * MiB)
    assert found.seconds(unseen) == pytest.approx(times([unseen])[unseen], rel=1e-4)


@pytest.mark.parametrize(("calls", "node_size"), [(CALLS, 2), (ONE_RANK_PER_NODE, 1)])
def test_noisy_network_is_within_a_tenth(calls: list[AllReduceSpec], node_size: int) -> None:
    fits = [fit_two_links(times(calls, 0.03, seed, node_size), node_size).between for seed in range(100)]
    latency, byte_seconds = NETWORK
    for fit in fits:
        assert fit.latency.value == pytest.approx(latency, rel=0.1)
        assert fit.byte_seconds.value == pytest.approx(byte_seconds, rel=0.1)
    assert 0.88 < mean(fit.latency.low < latency < fit.latency.high for fit in fits) < 1


def test_one_rank_per_node_has_no_link_inside() -> None:
    model, error = two_links_and_error(times(ONE_RANK_PER_NODE, 0.03, node_size=1), 1)
    assert model.inside is None
    assert error < 0.06


def test_undetermined_links_are_refused() -> None:
    one_size = [call for call in CALLS if call.nbytes == KiB]
    with pytest.raises(Undetermined, match="cannot separate latency and bandwidth inside and between nodes"):
        fit_two_links(times(one_size), 2)
