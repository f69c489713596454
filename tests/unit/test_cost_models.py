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
    Counts,
    choose_links,
    counts,
    fit_links,
    nbytes_of,
)
from ddpperf.analysis.library_cost_model import choose_envelope
from ddpperf.analysis.logarithmic_fit import Estimate, Undetermined, held_out_error
from ddpperf.collectives.algorithms import ALGORITHMS
from ddpperf.specs import OWN_ALGORITHMS, AllReduceSpec
from tests.thread_transport import buffers_of, reduced

KiB, MiB, GiB = 2**10, 2**20, 2**30
SIZES = [KiB, 64 * KiB, MiB, 16 * MiB, 256 * MiB]
LATENCY, BYTE_SECONDS, REDUCE_SECONDS = 5e-6, 1 / 400e9, 1 / 1500e9
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


CALLS = [
    AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm)
    for algorithm in OWN_ALGORITHMS
    if algorithm != "gather_broadcast"
    for N in (2, 3, 4, 8)
    for nbytes in SIZES
]


def cost(call: AllReduceSpec) -> Counts:
    return counts(call.algorithm, call.world_size, call.nbytes)


def times(noise: float = 0.0, seed: int = 0) -> dict[AllReduceSpec, float]:
    """What known values make of every algorithm, each off by a factor."""
    drawn = random.Random(seed)
    found = {}
    for call in CALLS:
        bytes_seconds = cost(call).volume * BYTE_SECONDS + cost(call).reduced * REDUCE_SECONDS
        seconds = cost(call).latency * LATENCY + call.nbytes * bytes_seconds
        found[call] = seconds * drawn.lognormvariate(0, noise)
    return found


def rings(N: int) -> dict[AllReduceSpec, float]:
    return {call: t for call, t in times().items() if (call.algorithm, call.world_size) == ("ring", N)}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("N", [2, 3, 4, 6, 8, 9])
def test_no_rank_sends_more_than_the_model_counts(algorithm: str, N: int) -> None:
    transports = reduced(algorithm, buffers_of(N, 720, torch.float32))
    model = counts(algorithm, N)
    assert max(each.sent["elements"] for each in transports) / 720 <= model.volume + 1e-9


def test_known_values_are_found_again() -> None:
    found = fit_links(times(), reduction=True)
    assert found.latency.value == pytest.approx(LATENCY)
    assert found.byte_seconds.value == pytest.approx(BYTE_SECONDS)
    assert found.reduce_seconds is not None
    assert found.reduce_seconds.value == pytest.approx(REDUCE_SECONDS)
    assert found.seconds(AllReduceSpec(world_size=16, nbytes=MiB, algorithm="ring")) == pytest.approx(
        30 * LATENCY + MiB * (2 * 15 / 16 * BYTE_SECONDS + 15 / 16 * REDUCE_SECONDS)
    )


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_latency_intervals_have_their_coverage(noise: float) -> None:
    found = [fit_links(times(noise, seed), reduction=True) for seed in range(200)]
    held = [each.latency.low < LATENCY < each.latency.high for each in found]
    assert 0.90 < mean(held) < 0.99
    assert mean(each.latency.value for each in found) == pytest.approx(LATENCY, rel=0.02)
    assert mean(each.byte_seconds.low < BYTE_SECONDS < each.byte_seconds.high for each in found) > 0.90
    assert mean(each.byte_seconds.value for each in found) == pytest.approx(BYTE_SECONDS, rel=0.05)


def test_free_bytes_are_fitted_as_zero() -> None:
    started = {call: cost(call).latency * LATENCY for call in CALLS}
    found = fit_links(started, reduction=False)
    assert found.byte_seconds.value == 0
    assert found.byte_seconds.inverse().high == math.inf
    assert found.latency.value == pytest.approx(LATENCY, rel=1e-4)


def test_all_algorithms_share_one_link_model() -> None:
    model, held_out_error = choose_links(times(noise=0.02))
    assert model.reduce_seconds is not None, "what is added up costs time here"
    assert held_out_error < 0.03
    bandwidth = model.byte_seconds.inverse()
    assert bandwidth.value == pytest.approx(1 / BYTE_SECONDS, rel=0.05)
    assert bandwidth.low < 1 / BYTE_SECONDS < bandwidth.high


def test_held_out_size_is_not_fitted() -> None:
    """A fit that knows its sizes only is wrong by half on others; the ends are in every fit."""

    def remember(kept: Mapping[AllReduceSpec, float]) -> Callable[[AllReduceSpec], float]:
        assert {KiB, 256 * MiB} <= {call.nbytes for call in kept}
        return lambda call: kept.get(call, 1.5 * times()[call])

    assert held_out_error(times(), remember, nbytes_of) == pytest.approx(0.5)


def test_undetermined_values_are_refused() -> None:
    """A ring of so many ranks sends twice what it adds up, at every size."""
    with pytest.raises(
        match="these calls cannot separate the time of sending from that of adding; measure other sizes",
    ):
        fit_links(rings(4), reduction=True)
    with pytest.raises(Undetermined, match="measure other sizes or algorithms"):
        fit_links({call: times()[call] for call in CALLS[:2]}, reduction=True)
    assert choose_links(rings(4))[0].reduce_seconds is None


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a cost model needs two ranks or more, got 1"):
        counts("ring", 1)
    with pytest.raises(
        ValueError, match="backend has no cost model; those that have are gather_broadcast, ring"
    ):
        counts("backend", 2)


def test_two_protocols_are_told_from_one() -> None:
    sizes = [2**power for power in range(10, 30, 2)]
    one = [10e-6 + size / 300e9 for size in sizes]
    two = [min(10e-6 + size / 50e9, 40e-6 + size / 300e9) for size in sizes]
    assert len(choose_envelope(sizes, one).envelope.lines) == 1
    chosen = choose_envelope(sizes, two)
    assert len(chosen.envelope.lines) == 2
    assert chosen.held_out_error < 1e-6
    assert chosen.envelope.seconds(3 * MiB) == pytest.approx(40e-6 + 3 * MiB / 300e9)
    few = choose_envelope(sizes[::2], two[::2])
    assert len(few.envelope.lines) == 1, "of two, an error on sizes left out could not be told"
    assert few.held_out_error > 0.1


@pytest.mark.parametrize(("noise", "sizes"), [pytest.param(0.005, 11, marks=pytest.mark.slow), (0.2, 5)])
def test_envelope_intervals_have_their_coverage(noise: float, sizes: int) -> None:
    """On GPUs as captured calls have it, on the CPU as gloo's do."""
    held = []
    for seed in range(60):
        drawn = random.Random(seed)
        measured = [KiB * 4 ** (each * (10 // (sizes - 1))) for each in range(sizes)]
        seconds = [(10e-6 + nbytes / 300e9) * drawn.lognormvariate(0, noise) for nbytes in measured]
        chosen = choose_envelope(measured, seconds)
        held.append(chosen.latency.low < 10e-6 < chosen.latency.high)
        held.append(chosen.byte_seconds.low < 1 / 300e9 < chosen.byte_seconds.high)
        assert chosen.latency.value == chosen.envelope.seconds(0)
        assert chosen.byte_seconds.value == min(slope for _, slope in chosen.envelope.lines)
    assert 0.88 < mean(held) < 1


def test_inverse_swaps_the_ends_of_an_interval() -> None:
    bandwidth = Estimate(value=2.0, low=1.0, high=4.0).inverse(8.0)
    assert bandwidth == Estimate(value=4.0, low=2.0, high=8.0)
    assert Estimate(value=0.0, low=0.0, high=4.0).inverse() == Estimate(
        value=math.inf, low=0.25, high=math.inf
    )


@pytest.mark.parametrize("N", [4, 8])
def test_nccl_is_predicted_on_held_out_sizes(N: int) -> None:
    """Within 10 %, and better by several protocols than by a single line."""
    measured = H200[N]
    chosen = choose_envelope(list(measured), [microseconds / 1e6 for microseconds in measured.values()])
    assert chosen.held_out_error < 0.10
    assert len(chosen.envelope.lines) > 1


@pytest.mark.parametrize(("runs", "tolerance"), [(20, 0.25), pytest.param(200, 0.08, marks=pytest.mark.slow)])
def test_held_out_error_is_that_of_new_sizes(runs: int, tolerance: float) -> None:
    """Three lines can fit noise: the error that chose their number is an eighth too small."""
    drawn = random.Random(0)

    def took(size: int) -> float:
        return (10e-6 + size / 300e9) * drawn.lognormvariate(0, 0.1)

    sizes = [2**power for power in range(10, 31, 3)]
    told, new = [], []
    for _ in range(runs):
        chosen = choose_envelope(sizes, [took(size) for size in sizes])
        told.append(chosen.held_out_error)
        new.append(
            median(
                abs(chosen.envelope.seconds(size) / took(size) - 1)
                for size in (4 * each for each in sizes[1:-2])
            )
        )
    assert mean(told) == pytest.approx(mean(new), rel=tolerance)


def test_report_formulas_are_what_they_describe() -> None:
    N, S, B = 4, 8e6, 1e9
    seconds = [report.seconds(N, S, B) for report in REPORT_FORMULAS]
    volume, doubling, aggregate = seconds[0] * B, seconds[1], seconds[2] * B
    assert volume == pytest.approx(counts("ring", N).volume * S)
    assert doubling == pytest.approx(counts("recursive_doubling", N).volume * S / B)
    assert aggregate == pytest.approx(N * volume) == pytest.approx(counts("gather_broadcast", N).volume * S)
    assert doubling == pytest.approx(math.log2(N) * S / B)
