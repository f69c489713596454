"""Told of all_reduces besides their seconds: who is as fast, what the framework costs, the link's share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest

from ddpperf.analysis.cost_models import LinkModel, choose_links
from ddpperf.analysis.logarithmic_fit import Estimate
from ddpperf.machine.hardware import Links, Machine
from ddpperf.machine.network import Interface
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.notes import NoteKind
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, CollectiveSpec
from ddpperf.specs.collective import CollectiveKind
from perf.common.all_reduces import as_fast, link_metric, link_utilization, the_fastest, warn_if_undetermined
from perf.test_all_reduce import call_metrics, model_metrics
from perf.test_all_reduce import test_fastest_all_reduce as fastest_all_reduce
from tests.fake_nvml import healthy

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
GPUS = tuple(healthy(number).gpu for number in range(2))  # joined by a link of 450 GB/s
NODES = Machine(
    links=Links(node=2),
    gpus=GPUS,
    interface=Interface(name="eth0", address="10.0.0.1", link="eth10", bytes_per_second=2048.0),
)


def call(*rounds: float, kernels: tuple[float, ...] = ()) -> Measured:
    """One step a round, whose slower rank took so long; kernels: of the library, by rank."""
    counters = {"kernel_seconds": kernels} if kernels else {}
    sample = Sample(
        set="A1", side="A", torch="2", seconds=tuple((0.5 * each, each) for each in rounds), counters=counters
    )
    return Measured(spec=SPEC, iterations=1, samples=(sample,))


def measure_on(machine: Machine) -> Measure:
    nothing: Any = None
    return Measure(nothing, nothing, nothing, machine=machine)


@pytest.mark.parametrize(
    ("kind", "bytes_of_node"),
    [("hierarchical", 1024), ("all_to_all", 1024), ("ring", 1536), ("reduce_scatter", 768)],
)
def test_link_between_nodes_carries_a_nodes_bytes(kind: Any, bytes_of_node: int) -> None:
    """Of a call of 1 KiB in a second, on two nodes of two ranks with a link of 2 KiB/s."""
    spec: AllReduceSpec | CollectiveSpec
    if kind in get_args(CollectiveKind):
        spec = CollectiveSpec(world_size=4, nbytes=1024, kind=kind)
    else:
        size = 2 if kind == "hierarchical" else 0
        spec = AllReduceSpec(world_size=4, nbytes=1024, algorithm=kind, node_size=size)
    measure = measure_on(NODES)
    factor = 1.5 if isinstance(spec, AllReduceSpec) else 0.75
    call_metrics(measure, dataclasses.replace(call(1.0), spec=spec), lambda t: 1024 * factor / t)
    assert measure.metrics["link_utilization"]["value"] == pytest.approx(bytes_of_node / 2048)


@pytest.mark.parametrize("algorithm", ["gather_broadcast", "recursive_doubling", "halving_doubling", "tree"])
def test_unknown_bytes_between_nodes_use_no_link(algorithm: Any) -> None:
    """In a tree on two nodes of two ranks the busiest node sends 2/3 of what busbw says."""
    for world_size, known in ((2, True), (4, False)):
        measure = measure_on(NODES)
        spec = AllReduceSpec(world_size=world_size, nbytes=1024, algorithm=algorithm)
        call_metrics(measure, dataclasses.replace(call(1.0), spec=spec), lambda t: 1024 / t)
        assert "busbw_bytes_per_second" in measure.metrics
        assert ("link_utilization" in measure.metrics) == known


def test_times_within_their_errors_are_as_fast() -> None:
    calls = {
        "ring": call(1.0, 1.1, 0.9, 1.0, 1.05, 0.95),
        "tree": call(1.02, 1.1, 0.95, 1.03, 1.05, 0.9),
        "gather_broadcast": call(2.0, 2.1, 1.9, 2.0, 2.05, 1.95),
    }
    assert as_fast(calls, "ring") == ["tree"]
    assert as_fast({name: calls[name] for name in ("ring", "gather_broadcast")}, "ring") == []


def test_the_fastest_has_the_least_median() -> None:
    calls = {"backend": call(1.0, 3.0, 1.1), "ring": call(2.0, 2.01, 2.02), "tree": call(5.0, 5.1, 5.2)}
    assert the_fastest(calls) == "backend is the fastest, and equal within the error: ring"
    assert the_fastest({name: calls[name] for name in ("ring", "tree")}) == "ring is the fastest"


@pytest.mark.parametrize(("candidate", "fastest"), [(1.0, "backend"), (3.0, "ring")])
def test_each_side_names_its_own_fastest(candidate: float, fastest: str) -> None:

    def both(base: float, changed: float) -> Measured:
        seconds = ("A1", "A", base), ("B1", "B", changed)
        samples = [Sample(set=name, side=side, torch="2", seconds=((t, t),) * 6) for name, side, t in seconds]
        return Measured(spec=SPEC, iterations=1, samples=tuple(samples))

    class Contest(Measure):
        def __call__(self, spec: Any) -> Measured:
            return both(1.0, candidate)

        def reference(self, name: str, spec: Any) -> Measured:
            return both(2.0, 2.0) if name == "ring" else both(9.0, 9.0)

    nothing: Any = None
    measure = Contest(nothing, nothing, nothing)
    fastest_all_reduce(measure, SPEC)
    assert [note.text for note in measure.record.notes] == [
        "1KiB on 2 ranks, base: backend is the fastest",
        f"1KiB on 2 ranks, candidate: {fastest} is the fastest",
    ]


def test_framework_time_excludes_the_kernel() -> None:
    measure = measure_on(Machine())
    call_metrics(measure, call(10e-6, 11e-6, 12e-6, kernels=(8e-6, 7e-6)), lambda t: 360e9)
    assert measure.metrics["framework_seconds"]["value"] == pytest.approx(11e-6 - 7e-6)
    silent = measure_on(Machine())
    call_metrics(silent, call(10e-6), lambda t: 360e9)
    assert "framework_seconds" not in silent.metrics


def test_link_utilization_needs_a_known_link() -> None:
    known, unknown = (
        measure_on(Machine(device="cuda", gpus=GPUS)),
        measure_on(Machine(device="cuda")),
    )
    for measure in (known, unknown):
        call_metrics(measure, call(10e-6), lambda t: 360e9)
    assert known.metrics["link_utilization"]["value"] == pytest.approx(0.8)
    assert list(unknown.metrics) == ["algbw_bytes_per_second", "busbw_bytes_per_second"]


@pytest.mark.parametrize(("busbw", "warns"), [(451e9, True), (450e9, False)])
def test_bandwidth_above_the_link_is_a_warning(busbw: float, warns: bool) -> None:
    measure = measure_on(Machine(gpus=GPUS))
    link_utilization(measure, {"A1": busbw}, 2)
    assert measure.metrics["link_utilization"]["value"] == pytest.approx(busbw / 450e9)
    assert [
        note.text.startswith("bandwidth above the link's 450 GB/s: ") for note in measure.record.notes
    ] == [True] * warns


def test_unbounded_bandwidth_stores_only_its_lower_end() -> None:
    """Messages between two H200s, bound by launches, fitted 3 TB/s, at least 211 GB/s."""
    known, unknown = measure_on(Machine()), measure_on(Machine())
    assert link_metric(known, {"A1": Estimate(value=3e11, low=2e11, high=6e11)})
    assert not link_metric(unknown, {"A1": Estimate(value=3e12, low=2.1e11, high=math.inf)})
    assert [metric["value"] for metric in known.metrics.values()] == [3e11, 2e11, 6e11]
    assert {name: metric["value"] for name, metric in unknown.metrics.items()} == {
        "link_bytes_per_second_low": 2.1e11
    }


def test_undetermined_model_is_a_warning() -> None:
    """A ring on eight ranks sends one message per MiB, so latency and bandwidth cannot be told apart."""
    sizes = (64 * 2**20, 80 * 2**20, 96 * 2**20, 128 * 2**20)
    rings = [AllReduceSpec(world_size=8, nbytes=nbytes, algorithm="ring") for nbytes in sizes]
    measure = measure_on(Machine())
    with warn_if_undetermined(measure, "a model"):
        choose_links({ring: ring.nbytes / 1e9 for ring in rings})
    (note,) = measure.record.notes
    assert note.kind is NoteKind.WARNING
    assert note.text.startswith("a model is missing: these calls cannot separate ")
    assert note.text.endswith("measure other sizes or algorithms")


@pytest.mark.parametrize(("link", "notes"), [(None, 0), (450e9, 3)])
def test_reports_formulas_use_the_known_link(link: float | None, notes: int) -> None:
    free = Estimate(value=1e-15, low=0.0, high=1e-11)
    model = LinkModel(
        latency=Estimate(value=1e-5, low=9e-6, high=1.1e-5), byte_seconds=free, reduce_seconds=None
    )
    measure = measure_on(Machine(device="cuda", gpus=GPUS if link else ()))
    spec = AllReduceSpec(world_size=2, nbytes=2**24, algorithm="ring")
    model_metrics(measure, spec, {"A1": 1e-3}, {"A1": model})
    executions = {
        name: metric["value"]
        for name, metric in measure.metrics.items()
        if name.endswith("_bytes_over_measured")
    }
    assert len(measure.record.notes) == notes
    if link:
        assert executions == pytest.approx(
            {
                "ring_bytes_over_measured": 2**24 / link / 1e-3,
                "aggregate_bytes_over_measured": 2**25 / link / 1e-3,
            }
        )
        assert measure.record.notes[0].text.startswith(
            "2 (N-1) S / N: the bytes that each rank sends in a ring"
        )
    else:
        assert executions == {}
