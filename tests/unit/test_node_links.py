"""The links that test_cost_model fits on several nodes, from canned times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddpperf.analysis.cost_models import Counts, counts_by_link
from ddpperf.machine.hardware import Links, Machine
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec
from perf.test_all_reduce import modelled
from perf.test_all_reduce import test_cost_model as cost_model
from tests.fake_measure import measuring

SIZES = (2**16, 2**20, 2**22, 2**24)
INSIDE, BETWEEN = (30e-6, 1 / 3e9), (2e-3, 1 / 125e6)  # seconds per message and per byte


class Nodes(Measure):
    """Measures on nodes of `node` ranks, where calls take exactly what `seconds_of` returns."""

    def __init__(self, node: int, world_sizes: tuple[int, ...], seconds_of: Callable[[Any, int], float]):
        nothing: Any = None
        links = Links(node=node, buffer_sizes=SIZES)
        super().__init__(nothing, measuring(Machine(links=links, world_sizes=world_sizes)))
        self.seconds_of, self.measured_specs = seconds_of, list[Any]()

    def __call__(self, spec: Any) -> Measured:
        self.measured_specs.append(spec)
        seconds = self.seconds_of(spec, self.machine.links.node)
        rounds = tuple((seconds,) * spec.world_size for _ in range(3))
        return Measured(
            spec=spec, iterations=1, samples=(Sample(set="A1", side="A", torch="2", seconds=rounds),)
        )

    def reference(self, name: str, spec: Any) -> Measured:
        return self(spec)

    def value(self, metric: str) -> float:
        return float(self.metrics[metric]["value"])


def by_two_links(spec: Any, node: int) -> float:
    inside, between = counts_by_link(spec.algorithm, spec.world_size, node, spec.nbytes)
    return _seconds(inside, spec.nbytes, *INSIDE) + _seconds(between, spec.nbytes, *BETWEEN)


def _seconds(load: Counts, nbytes: int, message_seconds: float, byte_seconds: float) -> float:
    return load.latency * message_seconds + load.volume * nbytes * byte_seconds


def test_cost_model_finds_both_links() -> None:
    measure = Nodes(2, (1, 2, 4), by_two_links)
    cost_model(measure, AllReduceSpec(world_size=4, nbytes=2**24, algorithm="hierarchical", node_size=2))
    for place, (message_seconds, byte_seconds) in (("inside", INSIDE), ("between", BETWEEN)):
        assert measure.value(f"{place}_message_seconds") == pytest.approx(message_seconds, rel=1e-3)
        assert measure.value(f"{place}_bytes_per_second") == pytest.approx(1 / byte_seconds, rel=1e-3)
    predicted = [name for name in measure.metrics if name.startswith("predicted_over_measured_")]
    assert len(predicted) == len(SIZES)
    assert all(measure.value(name) == pytest.approx(1) for name in predicted)
    assert measure.value("held_out_error") == pytest.approx(0, abs=1e-3)
    measured = {(spec.algorithm, spec.world_size) for spec in measure.measured_specs}
    assert measured == {("ring", 2), ("ring", 4), ("hierarchical", 4)}


def test_one_rank_per_node_has_one_link() -> None:
    measure = Nodes(1, (1, 2, 3), by_two_links)
    cost_model(measure, AllReduceSpec(world_size=3, nbytes=2**24, algorithm="ring"))
    assert measure.value("between_message_seconds") == pytest.approx(BETWEEN[0], rel=1e-3)
    assert "inside_message_seconds" not in measure.metrics
    assert not measure.record.notes


def test_algorithms_of_one_node_are_all_modelled() -> None:
    assert len(modelled(4, 2**20, Links(node=4))) == 5
    assert [call.algorithm for call in modelled(4, 2**20, Links(node=1))] == ["ring"]
