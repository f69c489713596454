"""The cost model with a link inside the nodes and one between them, and its fit."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from statistics import mean

import pytest

from ddpperf.analysis.cost_models import counts
from ddpperf.analysis.logarithmic_fit import Undetermined
from ddpperf.analysis.node_cost_model import (
    Load,
    TwoLinkCounts,
    fit_two_links,
    two_link_counts,
    two_links_and_error,
)
from ddpperf.specs import Algorithm, AllReduceSpec

KiB, MiB = 2**10, 2**20
SIZES = (KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: seconds of an empty message, and seconds per byte in one direction."""

    latency: float
    byte_seconds: float

    def seconds(self, load: Load, nbytes: float) -> float:
        return load.messages * self.latency + load.volume * nbytes * self.byte_seconds


INSIDE = Link(latency=30e-6, byte_seconds=1 / 3e9)
NETWORK = Link(latency=2e-3, byte_seconds=1 / 125e6)
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
        load = two_link_counts(call.algorithm, call.world_size, node_size, call.nbytes)
        seconds = INSIDE.seconds(load.inside, call.nbytes) + NETWORK.seconds(load.between, call.nbytes)
        found[call] = seconds * drawn.lognormvariate(0, noise)
    return found


def test_flat_ring_loads_the_network() -> None:
    found = two_link_counts("ring", 6, 2, 64 * KiB)
    assert found == TwoLinkCounts(inside=Load(), between=Load(messages=10, volume=10 / 6))


def test_hierarchical_loads_both_links() -> None:
    found = two_link_counts("hierarchical", 12, 4, 64 * KiB)
    assert found.inside == Load(messages=6, volume=6 / 4)
    assert found.between == Load(messages=4, volume=4 / 3)


def test_one_rank_per_node_loads_only_the_network() -> None:
    for algorithm in ("ring", "hierarchical", "tree"):
        assert two_link_counts(algorithm, 4, 1, 64 * KiB).inside == Load()
    hierarchical, ring = (two_link_counts(name, 4, 1, 64 * KiB) for name in ("hierarchical", "ring"))
    assert hierarchical == ring


def test_one_node_has_the_counts_of_one_link() -> None:
    for algorithm in ("ring", "tree", "halving_doubling"):
        one_link, found = counts(algorithm, 4, 16 * MiB), two_link_counts(algorithm, 4, 8, 16 * MiB)
        assert found.inside == Load(messages=one_link.latency, volume=one_link.volume)
        assert found.between == Load()
    assert two_link_counts("hierarchical", 4, 4, KiB) == two_link_counts("ring", 4, 4, KiB)


def test_equal_links_add_up_to_one_link() -> None:
    one_link, found = (
        counts("hierarchical", 12, KiB, node_size=4),
        two_link_counts("hierarchical", 12, 4, KiB),
    )
    assert one_link.latency == found.inside.messages + found.between.messages
    # A rank sends a part of what crosses its node's network link.
    assert one_link.volume == pytest.approx(found.inside.volume + found.between.volume / 4)


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="5 ranks fill no whole nodes of 2; pass a multiple of 2"):
        two_link_counts("ring", 5, 2)
    with pytest.raises(ValueError, match="halving_doubling has no cost model for several nodes"):
        two_link_counts("halving_doubling", 4, 2)


def test_both_links_are_fitted() -> None:
    found = fit_two_links(times(CALLS), 2)
    assert found.inside is not None
    for fitted, link in ((found.inside, INSIDE), (found.between, NETWORK)):
        assert fitted.latency.value == pytest.approx(link.latency, rel=1e-4)
        assert fitted.byte_seconds.value == pytest.approx(link.byte_seconds, rel=1e-4)
    unseen = AllReduceSpec(algorithm="hierarchical", world_size=8, node_size=2, nbytes=2 * MiB)
    assert found.seconds(unseen) == pytest.approx(times([unseen])[unseen], rel=1e-4)


@pytest.mark.parametrize(("calls", "node_size"), [(CALLS, 2), (ONE_RANK_PER_NODE, 1)])
def test_noisy_network_is_within_a_tenth(calls: list[AllReduceSpec], node_size: int) -> None:
    fits = [fit_two_links(times(calls, 0.03, seed, node_size), node_size).between for seed in range(100)]
    for fit in fits:
        assert fit.latency.value == pytest.approx(NETWORK.latency, rel=0.1)
        assert fit.byte_seconds.value == pytest.approx(NETWORK.byte_seconds, rel=0.1)
    held = [fit.latency.low < NETWORK.latency < fit.latency.high for fit in fits]
    assert 0.88 < mean(held) < 1


def test_one_rank_per_node_has_no_link_inside() -> None:
    model, error = two_links_and_error(times(ONE_RANK_PER_NODE, 0.03, node_size=1), 1)
    assert model.inside is None
    assert error < 0.06
    model = dataclasses.replace(model, node_size=2)
    inside = AllReduceSpec(algorithm="ring", world_size=2, nbytes=MiB)
    with pytest.raises(Undetermined, match="no measured all-reduce used the link inside a node"):
        model.seconds(inside)


def test_undetermined_links_are_refused() -> None:
    one_node = [call for call in CALLS if call.world_size == 2]
    with pytest.raises(Undetermined, match="no measured all-reduce crossed nodes; measure world sizes"):
        fit_two_links(times(one_node), 2)
    with pytest.raises(Undetermined, match="no measured all-reduce crossed nodes"):
        fit_two_links({}, 2)
    one_size = [call for call in CALLS if call.nbytes == KiB]
    with pytest.raises(Undetermined, match="cannot separate latency and bandwidth inside and between nodes"):
        fit_two_links(times(one_size), 2)
