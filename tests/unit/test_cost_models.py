"""Cost models: the algorithms' counts, fits, and choices by cross-validation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from statistics import mean, median

import pytest
import torch

from ddpperf.analysis.cost_models import (
    REPORT_FORMULAS,
    UNITS,
    Counts,
    Undetermined,
    choose_cost_model,
    choose_lines,
    counts,
    counts_by_link,
    fit_cost_model,
    held_out_error,
    nbytes_of,
    seconds_by,
)
from ddpperf.collectives.algorithms import ALGORITHMS
from ddpperf.specs import AllReduceSpec
from ddpperf.specs.collective import OWN_ALGORITHMS, Algorithm
from tests.thread_transport import buffers_of, reduced

KiB, MiB, GiB = 2**10, 2**20, 2**30
SIZES = (KiB, 64 * KiB, MiB, 16 * MiB, 256 * MiB)
# Seconds of each unit: of a node's links as GPUs have them, and of a network of 1 Gbit/s
TRUE = dict(zip(UNITS, (5e-6, 1 / 400e9, 2e-3, 1 / 125e6, 1 / 1500e9), strict=True))
# Microseconds of captured NCCL all_reduces of float32 on H200s (torch 2.11), by number of ranks.
H200_SIZES = (KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, GiB)
H200 = {
    N: dict(zip(H200_SIZES, microseconds, strict=True))
    for N, microseconds in {
        2: (10.6, 11.7, 18.1, 36.3, 77.3, 255.0, 900.0, 3228.0),
        4: (14.9, 16.2, 21.7, 43.3, 98.5, 329.0, 1190.0, 4548.0),
        8: (20.1, 22.8, 28.8, 50.3, 120.0, 371.0, 1355.0, 5228.0),
    }.items()
}


def calls(algorithm: Algorithm, world_sizes: tuple[int, ...], node_size: int = 0) -> list[AllReduceSpec]:
    return [
        AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, node_size=node_size)
        for N in world_sizes
        for nbytes in SIZES
    ]


ALIKE = [algorithm for algorithm in OWN_ALGORITHMS if algorithm != "gather_broadcast"]
ON_A_NODE = [call for algorithm in ALIKE for call in calls(algorithm, (2, 3, 4, 8))]
# Flat and hierarchical all-reduces on one node and on 2 and 3 nodes of 2 ranks
ON_NODES = [*calls("ring", (2, 4, 6)), *calls("hierarchical", (4, 6), 2)]


def times(
    calls: list[AllReduceSpec], node_size: int = 8, noise: float = 0.0, seed: int = 0
) -> dict[AllReduceSpec, float]:
    """What the true values make of calls, each off by a factor. Between nodes, adding is part of sending."""
    drawn = random.Random(seed)
    found = {}
    for call in calls:
        inside, between = counts_by_link(call.algorithm, call.world_size, node_size, call.nbytes)
        S = call.nbytes
        added = inside.reduced * S if node_size == 8 else 0.0
        numbers = (inside.latency, inside.volume * S, between.latency, between.volume * S, added)
        seconds = sum(number * TRUE[unit] for number, unit in zip(numbers, UNITS, strict=True))
        found[call] = seconds * drawn.lognormvariate(0, noise)
    return found


# --- counts


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("N", [2, 3, 4, 6, 8, 9])
def test_no_rank_sends_more_than_the_model_counts(algorithm: str, N: int) -> None:
    transports = reduced(algorithm, buffers_of(N, 720, torch.float32))
    assert max(each.sent["elements"] for each in transports) / 720 <= counts(algorithm, N).volume + 1e-9


def test_each_algorithm_loads_its_links() -> None:
    assert counts_by_link("ring", 6, 2, 64 * KiB) == (Counts(), Counts(10, 10 / 6))
    assert counts_by_link("hierarchical", 12, 4, 64 * KiB) == (Counts(6, 6 / 4), Counts(4, 4 / 3))
    in_pieces = counts_by_link("hierarchical", 12, 4, 16 * MiB)
    assert in_pieces[1].latency == 1, "sending hides all latencies between nodes but one"
    assert counts_by_link("tree", 4, 8, 16 * MiB) == (counts("tree", 4, 16 * MiB), Counts())


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a cost model needs two ranks or more, got 1"):
        counts("ring", 1)
    with pytest.raises(ValueError, match="backend has no cost model; those that have are gather_broadcast"):
        counts("backend", 2)
    with pytest.raises(ValueError, match="halving_doubling has no cost model for several nodes"):
        counts_by_link("halving_doubling", 4, 2)


# --- fits


@pytest.mark.parametrize(("measured", "node_size"), [(ON_A_NODE, 8), (ON_NODES, 2)])
def test_known_values_are_found_again(measured: list[AllReduceSpec], node_size: int) -> None:
    found = fit_cost_model(times(measured, node_size), node_size, adding=node_size == 8)
    assert len(found.unit_seconds) == (3 if node_size == 8 else 4)
    for unit, estimate in found.unit_seconds.items():
        assert estimate.value == pytest.approx(TRUE[unit], rel=1e-3)
    unseen = AllReduceSpec(world_size=16, nbytes=2 * MiB, algorithm="ring")
    if node_size == 8:
        seconds = 30 * 5e-6 + 2 * MiB * (2 * 15 / 16 / 400e9 + 15 / 16 / 1500e9)
        assert fit_cost_model(times(measured), 16, adding=True).seconds(unseen) == pytest.approx(seconds)
    else:
        assert found.seconds(unseen) == pytest.approx(times([unseen], 2)[unseen], rel=1e-3)


@pytest.mark.parametrize(
    ("measured", "node_size", "noise"),
    [(ON_A_NODE, 8, 0.05), (ON_A_NODE, 8, 0.3), (ON_NODES, 2, 0.03), (calls("ring", (2, 3)), 1, 0.03)],
)
def test_intervals_have_their_coverage(measured: list[AllReduceSpec], node_size: int, noise: float) -> None:
    adding = node_size == 8
    found = [
        fit_cost_model(times(measured, node_size, noise, seed), node_size, adding=adding).unit_seconds
        for seed in range(100)
    ]
    for unit in ("message inside", "byte inside") if adding else ("message between", "byte between"):
        held = [each[unit].low < TRUE[unit] < each[unit].high for each in found]
        assert 0.88 < mean(held) <= 1
        assert mean(each[unit].value for each in found) == pytest.approx(TRUE[unit], rel=0.05)


def test_addition_that_costs_time_has_its_own_value() -> None:
    model, error = choose_cost_model(times(ON_A_NODE, noise=0.02), 8)
    assert "byte added" in model.unit_seconds
    assert error < 0.03


def test_free_bytes_are_fitted_as_zero() -> None:
    started = {
        call: counts(call.algorithm, call.world_size, call.nbytes).latency * 5e-6 for call in ON_A_NODE
    }
    found = fit_cost_model(started, 8, adding=False).unit_seconds
    assert found["byte inside"].value == 0
    assert found["byte inside"].inverse().high == math.inf
    assert found["message inside"].value == pytest.approx(5e-6, rel=1e-4)


def test_held_out_size_is_not_fitted() -> None:
    """A fit that knows its sizes only is wrong by half on others; the ends are in every fit."""
    measured = times(ON_A_NODE)

    def remember(kept: Mapping[AllReduceSpec, float]) -> Callable[[AllReduceSpec], float]:
        assert {KiB, 256 * MiB} <= {call.nbytes for call in kept}
        return lambda call: kept.get(call, 1.5 * measured[call])

    assert held_out_error(measured, remember, nbytes_of) == pytest.approx(0.5)


def test_undetermined_values_are_refused() -> None:
    """A ring of so many ranks sends twice what it adds up, at every size."""
    rings = times(calls("ring", (4,)))
    with pytest.raises(Undetermined, match=r"cannot separate the seconds per .*byte added; measure other"):
        fit_cost_model(rings, 8, adding=True)
    assert "byte added" not in choose_cost_model(rings, 8)[0].unit_seconds
    one_size = [call for call in ON_NODES if call.nbytes == KiB]
    with pytest.raises(Undetermined, match="cannot separate the seconds per message inside, byte inside"):
        fit_cost_model(times(one_size, 2), 2, adding=False)


# --- the library


def test_two_protocols_are_told_from_one() -> None:
    sizes = [2**power for power in range(10, 30, 2)]
    one = [10e-6 + size / 300e9 for size in sizes]
    two = [min(10e-6 + size / 50e9, 40e-6 + size / 300e9) for size in sizes]
    assert len(choose_lines(sizes, one).lines) == 1
    chosen = choose_lines(sizes, two)
    assert len(chosen.lines) == 2
    assert chosen.held_out_error < 1e-6
    assert seconds_by(chosen.lines, 3 * MiB) == pytest.approx(40e-6 + 3 * MiB / 300e9)
    few = choose_lines(sizes[::2], two[::2])
    assert len(few.lines) == 1, "of two, an error on sizes left out could not be told"
    assert few.held_out_error > 0.1


@pytest.mark.parametrize(("noise", "sizes"), [pytest.param(0.005, 11, marks=pytest.mark.slow), (0.2, 5)])
def test_intervals_of_lines_have_their_coverage(noise: float, sizes: int) -> None:
    """On GPUs as captured calls have it, on the CPU as gloo's do."""
    held = []
    for seed in range(60):
        drawn = random.Random(seed)
        measured = [KiB * 4 ** (each * (10 // (sizes - 1))) for each in range(sizes)]
        seconds = [(10e-6 + nbytes / 300e9) * drawn.lognormvariate(0, noise) for nbytes in measured]
        chosen = choose_lines(measured, seconds)
        held.append(chosen.latency.low < 10e-6 < chosen.latency.high)
        held.append(chosen.byte_seconds.low < 1 / 300e9 < chosen.byte_seconds.high)
        assert chosen.latency.value == seconds_by(chosen.lines, 0)
        assert chosen.byte_seconds.value == min(slope for _, slope in chosen.lines)
    assert 0.88 < mean(held) < 1


@pytest.mark.parametrize("N", [4, 8])
def test_nccl_is_predicted_on_held_out_sizes(N: int) -> None:
    """Within 10 %, and better by several protocols than by a single line."""
    chosen = choose_lines(list(H200[N]), [microseconds / 1e6 for microseconds in H200[N].values()])
    assert chosen.held_out_error < 0.10
    assert len(chosen.lines) > 1


@pytest.mark.parametrize(("runs", "tolerance"), [(20, 0.25), pytest.param(200, 0.08, marks=pytest.mark.slow)])
def test_held_out_error_is_that_of_new_sizes(runs: int, tolerance: float) -> None:
    """Three lines can fit noise: the error that chose their number is an eighth too small."""
    drawn = random.Random(0)

    def took(size: int) -> float:
        return (10e-6 + size / 300e9) * drawn.lognormvariate(0, 0.1)

    sizes = [2**power for power in range(10, 31, 3)]
    told, new = [], []
    for _ in range(runs):
        chosen = choose_lines(sizes, [took(size) for size in sizes])
        told.append(chosen.held_out_error)
        between = [4 * size for size in sizes[1:-2]]
        new.append(median(abs(seconds_by(chosen.lines, size) / took(size) - 1) for size in between))
    assert mean(told) == pytest.approx(mean(new), rel=tolerance)


def test_report_formulas_are_what_they_describe() -> None:
    N, S, B = 4, 8e6, 1e9
    seconds = [formula(N, S, B) for formula in REPORT_FORMULAS.values()]
    volume, doubling, aggregate = seconds[0] * B, seconds[1], seconds[2] * B
    assert volume == pytest.approx(counts("ring", N).volume * S)
    assert doubling == pytest.approx(counts("recursive_doubling", N).volume * S / B)
    assert aggregate == pytest.approx(N * volume) == pytest.approx(counts("gather_broadcast", N).volume * S)
