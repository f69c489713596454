"""Told of all_reduces besides their seconds: who is as fast, what the framework costs, the link's share."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpperf.analysis.cost_models import Cell, Estimate, choose_links
from ddpperf.plugin.hardware import Machine
from ddpperf.plugin.measure import Measure
from ddpperf.results import Measured, Sample
from ddpperf.specs import AllReduceSpec
from perf.calls import doubted_unless_told_apart
from perf.test_all_reduce import as_fast, bandwidths, beside_kernels, tell_link

SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def call(*rounds: float, kernels: tuple[float, ...] = ()) -> Measured:
    """One step a round, whose slower rank took so long; kernels: of the library, by rank."""
    counters = {"kernel_seconds": kernels} if kernels else {}
    sample = Sample(set="A1", side="A", torch="2", seconds=tuple((0.5 * each, each) for each in rounds), counters=counters)
    return Measured(spec=SPEC, iterations=1, samples=(sample,))


def measure_on(machine: Machine) -> Measure:
    nothing: Any = None
    return Measure(nothing, nothing, nothing, machine=machine)


def test_what_is_above_the_fastest_by_less_than_both_are_off_is_as_fast() -> None:
    calls = {
        "ring": call(1.0, 1.1, 0.9, 1.0, 1.05, 0.95),
        "tree": call(1.02, 1.1, 0.95, 1.03, 1.05, 0.9),
        "gather_broadcast": call(2.0, 2.1, 1.9, 2.0, 2.05, 1.95),
    }
    assert as_fast(calls, "ring") == ["tree"]
    assert as_fast({name: calls[name] for name in ("ring", "gather_broadcast")}, "ring") == []


def test_the_framework_costs_what_is_beside_the_kernel_that_waits_the_least() -> None:
    measure = measure_on(Machine())
    beside_kernels(measure, call(10e-6, 11e-6, 12e-6, kernels=(8e-6, 7e-6)))
    assert measure.metrics["framework_seconds"]["value"] == pytest.approx(11e-6 - 7e-6)
    silent = measure_on(Machine())
    beside_kernels(silent, call(10e-6))
    assert silent.metrics == {}, "of a kernel that was not seen nothing is told"


def test_a_links_share_is_told_only_of_a_link_that_is_known() -> None:
    known, unknown = measure_on(Machine(device="cuda", link_bytes_per_second=450e9)), measure_on(Machine(device="cuda"))
    for each in (known, unknown):
        bandwidths(each, {"A1": 360e9})
    assert known.metrics["link_utilization"]["value"] == pytest.approx(0.8)
    assert list(unknown.metrics) == ["busbw_bytes_per_second"]


def test_of_a_bandwidth_that_may_be_any_only_the_least_is_told() -> None:
    """Two H200s' messages, which launches bind, were fitted with 3 TB/s, and 211 GB/s at least."""
    known, unknown = measure_on(Machine()), measure_on(Machine())
    assert tell_link(known, {"A1": Estimate(value=3e11, low=2e11, high=6e11)})
    assert not tell_link(unknown, {"A1": Estimate(value=3e12, low=2.1e11, high=math.inf)})
    assert [metric["value"] for metric in known.metrics.values()] == [3e11, 2e11, 6e11]
    assert {name: metric["value"] for name, metric in unknown.metrics.items()} == {"link_bytes_per_second_low": 2.1e11}


def test_calls_that_tell_no_model_make_its_test_doubtful_with_the_reason() -> None:
    """Of a ring on eight ranks, whose messages are as many as their bytes are MiB."""
    sizes = (64 * 2**20, 80 * 2**20, 96 * 2**20, 128 * 2**20)
    cells = [Cell(algorithm="ring", N=8, nbytes=nbytes, seconds=nbytes / 1e9) for nbytes in sizes]
    measure = measure_on(Machine())
    with doubted_unless_told_apart(measure, "a model"):
        choose_links(cells)
    (note,) = measure.notes
    assert note.startswith("doubtful: a model is not told: a fit needs calls that tell ")
    assert note.endswith("measure other sizes or algorithms")
