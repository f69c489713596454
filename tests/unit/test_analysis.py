"""Speedup, bandwidth and spread: known points of their definitions, and bounds that no times may break."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.bandwidth import algbw, all_reduce_busbw, collective_busbw
from ddpperf.analysis.gpu_data_sheets import PEAK_FLOPS_PER_SECOND, peak_flops_per_second
from ddpperf.analysis.scaling import efficiency, part_speedups, strong_speedup, weak_speedup
from ddpperf.analysis.statistics import median_and_error
from tests.generated import BOUNDED, seconds

world_sizes = st.integers(1, 1024)
sizes = st.integers(1, 2**40)


# --- scaling


@pytest.mark.parametrize(
    ("t1", "tN", "N", "speedup"), [(1.0, 0.5, 2, 2.0), (3.0, 1.0, 4, 3.0), (1.0, 2.0, 8, 0.5)]
)
def test_strong_speedup_is_the_time_saved(t1: float, tN: float, N: int, speedup: float) -> None:
    assert strong_speedup(t1, tN, N) == pytest.approx(speedup)
    assert weak_speedup(t1, tN, N) == pytest.approx(N * speedup), (
        "an epoch ratio times N is the course reports' mistake"
    )


@BOUNDED
@given(seconds, seconds, world_sizes)
def test_efficiency_is_the_ratio_of_step_times(t1: float, tN: float, N: int) -> None:
    assert efficiency(weak_speedup(t1, tN, N), N) == pytest.approx(t1 / tN)
    assert efficiency(4.0, 8) == 0.5


@pytest.mark.parametrize(("weak", "speedups"), [(True, (3.2, 4.0)), (False, (0.8, 1.0))])
def test_speedup_of_parts_on_four_devices(weak: bool, speedups: tuple[float, float]) -> None:
    alone = {"forward": 2.0, "backward": 4.0, "data": 0.5, "optimizer": 0.005}
    together = {"forward": 2.5, "backward": 4.0, "data": 0.005, "optimizer": 0.5, "gradient_sync": 1.0}
    found = part_speedups(alone, together, 4, weak=weak)
    assert found == pytest.approx(dict(zip(("forward", "backward"), speedups, strict=True))), (
        "a part below 1% of either step has no speedup"
    )


# --- MFU


def test_peak_is_that_of_the_precision() -> None:
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops_per_second("NVIDIA H200", "fp32") == 66.9e12
    for gpu, precision in ((None, "bf16"), ("NVIDIA H20", "bf16"), ("Tesla V100-SXM2-16GB", "bf16")):
        assert peak_flops_per_second(gpu, precision) is None


def test_fewer_bits_are_never_slower() -> None:
    for gpu, peaks in PEAK_FLOPS_PER_SECOND.items():
        known = [peaks[precision] for precision in ("fp32", "tf32", "fp16") if precision in peaks]
        assert known == sorted(known), gpu
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], gpu


# --- bandwidth


@pytest.mark.parametrize(("N", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_busbw_is_algbw_times_nccl_tests_factor(N: int, factor: float) -> None:
    assert algbw(1e9, 0.5) == 2e9
    assert all_reduce_busbw(1e9, 0.5, N) == factor * 2e9
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert collective_busbw(kind, 1e9, 0.5, N) == factor / 2 * 2e9
    assert collective_busbw("broadcast", 1e9, 0.5, N) == 2e9


@pytest.mark.parametrize(
    ("S", "t"), [(-1, 1.0), (1024, 0.0), (1024, -1.0), (1024, math.nan), (math.nan, 1.0)]
)
def test_a_bandwidth_of_no_time_is_refused(S: float, t: float) -> None:
    with pytest.raises(ValueError, match="a bandwidth needs bytes and a positive time, got"):
        algbw(S, t)
    with pytest.raises(ValueError, match="a bandwidth needs bytes and a positive time, got"):
        all_reduce_busbw(S, t, 2)


@pytest.mark.parametrize("N", [1, 0, -2])
def test_one_rank_has_no_bus_bandwidth(N: int) -> None:
    with pytest.raises(ValueError, match=f"all_reduce has a bus bandwidth from 2 ranks up, got {N}"):
        all_reduce_busbw(1024, 1.0, N)


# --- statistics


def test_a_medians_error_is_what_medians_differ_by() -> None:
    drawn = random.Random(0)
    found = [median_and_error([drawn.gauss(5, 1) for _ in range(40)]) for _ in range(400)]
    assert statistics.mean(error for _, error in found) == pytest.approx(
        statistics.stdev(value for value, _ in found), rel=0.1
    )
    assert median_and_error([3.0]) == (3.0, 0.0)
