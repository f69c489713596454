"""The parts of a step, MFU, and the cost of an epoch on more devices."""

from __future__ import annotations

import pytest

from ddpperf.analysis.breakdown import (
    part_speedups,
    parts_without_waiting,
    straggler_spread,
)
from ddpperf.analysis.gpu_peaks import PEAK_FLOPS_PER_SECOND, mfu, peak_flops_per_second


def test_parts_are_of_the_least_waiting_rank() -> None:
    """Ranks that synchronize take equally long: which of them took a little longer is chance."""
    late = {"data": 1.0, "forward": 2.0, "backward": 5.0, "gradient_sync": 0.5, "optimizer": 1.0}
    waiting = {"data": 1.0, "forward": 2.0, "backward": 3.0, "gradient_sync": 2.501, "optimizer": 1.0}
    for first, second in ((late, waiting), (waiting, late)):
        assert parts_without_waiting({part: [first[part], second[part]] for part in first}) == late
    assert parts_without_waiting({"forward": [2.0], "backward": [3.0]}) == {"forward": 2.0, "backward": 3.0}


@pytest.mark.parametrize(("weak", "speedups"), [(True, (3.2, 4.0)), (False, (0.8, 1.0))])
def test_speedup_of_parts_on_four_devices(weak: bool, speedups: tuple[float, float]) -> None:
    alone = {"forward": 2.0, "backward": 4.0}
    together = {"forward": 2.5, "backward": 4.0, "gradient_sync": 1.0}
    found = part_speedups(alone, together, 4, weak=weak)
    assert found == pytest.approx(dict(zip(alone, speedups, strict=True)))


@pytest.mark.parametrize(("t1", "tN"), [(0.005, 0.5), (0.5, 0.005)])
def test_short_parts_have_no_speedup(t1: float, tN: float) -> None:
    found = part_speedups({"data": t1, "forward": 1.0}, {"data": tN, "forward": 1.0}, 2, weak=True)
    assert found == {"forward": 2.0}


def test_stragglers_are_told_by_what_ranks_take_alone() -> None:
    assert straggler_spread([2.0, 3.0, 2.5]) == pytest.approx(0.5)
    assert straggler_spread([2.0]) == 0


def test_mfu_uses_the_peak_of_the_precision() -> None:
    assert mfu(4e12, 0.01, 1e15) == pytest.approx(0.4)
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops_per_second("NVIDIA H200", "tf32") == 989.4e12 / 2
    assert peak_flops_per_second("NVIDIA H200", "fp32") == 66.9e12


@pytest.mark.parametrize("gpu", [None, "", "NVIDIA H2000", "NVIDIA H20", "H200"])
def test_unknown_gpu_has_no_peak(gpu: str | None) -> None:
    assert peak_flops_per_second(gpu, "bf16") is None


def test_unsupported_precision_has_no_peak() -> None:
    assert peak_flops_per_second("Tesla V100-SXM2-16GB", "bf16") is None


def test_fewer_bits_are_never_slower() -> None:
    order = ("fp32", "tf32", "fp16")
    for gpu, peaks in PEAK_FLOPS_PER_SECOND.items():
        known = [peaks[precision] for precision in order if precision in peaks]
        assert known == sorted(known), gpu
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], gpu
