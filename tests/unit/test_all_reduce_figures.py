"""All-reduces: the fastest one, the framework's time, the use of the link, and the fitted link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from ddpperf.analysis.cost_models import CostModel, choose_cost_model
from ddpperf.analysis.statistics import Estimate
from ddpperf.machine.hardware import Links, Machine
from ddpperf.machine.network import Interface
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.outcomes import NoteKind
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, CollectiveSpec
from ddpperf.specs.collective import CollectiveKind
from perf.common.all_reduces import link_utilization, warn_if_undetermined
from perf.test_all_reduce import call_metrics, one_link_metrics, the_fastest
from perf.test_all_reduce import test_all_reduce as all_reduce
from perf.test_all_reduce import test_fastest_all_reduce as fastest_all_reduce
from tests.fake_measure import FakeMeasure, measuring
from tests.fake_nvml import healthy

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
GPUS = tuple(healthy(number).gpu for number in range(2))  # joined by a link of 450 GB/s
NODES = Machine(
    links=Links(node=2),
    gpus=GPUS,
    interface=Interface(name="eth0", address="10.0.0.1", link="eth10", bytes_per_second=2048.0),
)


def test_call_that_puts_the_sum_elsewhere_has_a_bandwidth() -> None:
    """NCCL and gloo cannot do so: for them the buffer is copied first. A call takes 1 s."""
    measure: Any = FakeMeasure(lambda spec: call(1.0).samples)
    all_reduce(measure, dataclasses.replace(SPEC, in_place=False, algorithm="one_shot", execution="graph"))
    assert measure.metrics["busbw_bytes_per_second"] == {"A1": 1024.0}


def call(*rounds: float, kernels: tuple[float, ...] = (), side: str = "A") -> Measured:
    """Rounds of one step, whose slower rank took so long. kernels: the library's seconds by rank."""
    counters = {"kernel_seconds": kernels} if kernels else {}
    seconds = tuple((0.5 * each, each) for each in rounds)
    sample = Sample(set=f"{side}1", side=side, torch="2", seconds=seconds, counters=counters)
    return Measured(spec=SPEC, iterations=1, samples=(sample,))


def measure_on(machine: Machine) -> Measure:
    nothing: Any = None
    return Measure(nothing, measuring(machine))


def values(measure: Measure) -> dict[str, float]:
    return {name: metric["value"] for name, metric in measure.metrics.items()}


@pytest.mark.parametrize(
    ("kind", "bytes_of_node"),
    [("hierarchical", 1024), ("all_to_all", 1024), ("ring", 1536), ("reduce_scatter", 768), ("tree", None)],
)
def test_link_between_nodes_carries_a_nodes_bytes(kind: Any, bytes_of_node: int | None) -> None:
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
    used = None if bytes_of_node is None else pytest.approx(bytes_of_node / 2048)
    assert values(measure).get("link_utilization") == used


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (1.1, "ring is the fastest"),
        (1.01, "ring or tree is the fastest; their times are too close to tell which"),
        (0.99, "tree or ring is the fastest; their times are too close to tell which"),
    ],
)
def test_algorithms_that_are_too_close_are_all_named(tree: float, sentence: str) -> None:
    assert the_fastest({"backend": [2.0], "ring": [1.0], "tree": [tree]}, 0.0035) == sentence


def contest_notes(backend: Iterable[Sample], ring: Iterable[Sample], others: Iterable[Sample]) -> list[str]:
    """Compare all-reduces with these samples, and return the notes."""
    by_name = {"backend": backend, "ring": ring}
    measure: Any = FakeMeasure(lambda spec: by_name.get(spec.algorithm, others))
    fastest_all_reduce(measure, SPEC)
    notes: list[str] = measure.notes
    return notes


@pytest.mark.parametrize(("candidate", "fastest"), [(1.0, "backend"), (9.0, "ring")])
def test_each_side_names_its_own_fastest(candidate: float, fastest: str) -> None:

    def both(base: float, changed: float) -> list[Sample]:
        return [call(*[base] * 6).samples[0], call(*[changed] * 6, side="B").samples[0]]

    assert contest_notes(both(1.0, candidate), both(3.0, 3.0), both(9.0, 9.0)) == [
        "1KiB on 2 ranks, base: backend is the fastest",
        f"1KiB on 2 ranks, candidate: {fastest} is the fastest",
    ]


def test_rounds_of_a_single_process_set_make_no_winner() -> None:
    """They agree, but other process sets of the same call would differ by 20%."""
    (note,) = contest_notes(*(call(*[seconds] * 6).samples for seconds in (1.0, 1.2, 9.0)))
    assert note.startswith("1KiB on 2 ranks: backend or ring is the fastest; ")


def test_framework_time_excludes_the_kernel() -> None:
    measure = measure_on(Machine())
    call_metrics(measure, call(10e-6, 11e-6, 12e-6, kernels=(8e-6, 7e-6)), lambda t: 360e9)
    assert values(measure)["framework_seconds"] == pytest.approx(11e-6 - 7e-6)


@pytest.mark.parametrize(("busbw", "warns"), [(451e9, True), (450e9, False)])
def test_bandwidth_above_the_link_is_a_warning(busbw: float, warns: bool) -> None:
    measure = measure_on(Machine(gpus=GPUS))
    link_utilization(measure, {"A1": busbw}, 2)
    assert values(measure)["link_utilization"] == pytest.approx(busbw / 450e9)
    assert len(measure.notes) == warns


@pytest.mark.parametrize(
    ("low", "stored"),
    [
        (1 / 400e9, {"": 250e9, "_low": 200e9, "_high": 400e9}),
        (0.0, {"_low": 200e9}),  # launching the calls takes all of their time
    ],
)
def test_fitted_link_is_stored_as_far_as_known(low: float, stored: dict[str, float]) -> None:
    latency = Estimate(value=1e-5, low=9e-6, high=1.1e-5)
    byte_seconds = Estimate(value=1 / 250e9, low=low, high=1 / 200e9)
    measure = measure_on(Machine(gpus=GPUS))
    units = {"message inside": latency, "byte inside": byte_seconds}
    one_link_metrics(measure, 2, {"A1": CostModel(node_size=2, unit_seconds=units)})
    name = "link_bytes_per_second"
    found = {key.removeprefix(name): value for key, value in values(measure).items() if name in key}
    assert found == pytest.approx(stored)
    assert ("link_utilization" in measure.metrics) == ("" in stored)


def test_undetermined_model_is_a_warning() -> None:
    """A ring on eight ranks sends one message per MiB, so latency and bandwidth cannot be told apart."""
    sizes = (64 * 2**20, 80 * 2**20, 96 * 2**20, 128 * 2**20)
    rings = [AllReduceSpec(world_size=8, nbytes=nbytes, algorithm="ring") for nbytes in sizes]
    measure = measure_on(Machine())
    with warn_if_undetermined(measure, "a model"):
        choose_cost_model({ring: ring.nbytes / 1e9 for ring in rings}, 8)
    (note,) = measure.notes
    assert note.kind is NoteKind.WARNING
    assert note.text.startswith("a model is missing: these all-reduces cannot separate ")
