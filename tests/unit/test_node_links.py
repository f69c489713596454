"""The links that test_cost_model fits on several nodes, from canned times."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.analysis.cost_models import counts_by_link
from ddpperf.machine.hardware import Links, Machine
from ddpperf.results.samples import Sample
from ddpperf.specs import AllReduceSpec
from perf.test_all_reduce import modelled
from perf.test_all_reduce import test_cost_model as cost_model
from tests.fake_measure import FakeMeasure

SIZES = (2**16, 2**20, 2**22, 2**24)
INSIDE, BETWEEN = (30e-6, 1 / 3e9), (2e-3, 1 / 125e6)  # seconds per message and per byte


def measured_on(node: int, world_sizes: tuple[int, ...], spec: AllReduceSpec) -> FakeMeasure:
    """Fit links on nodes of `node` ranks, where calls take exactly what two links take."""

    def samples_of(call: Any) -> list[Sample]:
        loads = counts_by_link(call.algorithm, call.world_size, node, call.nbytes)
        seconds = sum(
            load.latency * message + load.volume * call.nbytes * byte
            for load, (message, byte) in zip(loads, (INSIDE, BETWEEN), strict=True)
        )
        return [Sample(set="A1", side="A", torch="2", seconds=((seconds,) * call.world_size,) * 3)]

    machine = Machine(links=Links(node=node, buffer_sizes=SIZES), world_sizes=world_sizes)
    measure = FakeMeasure(samples_of, machine)
    cost_model(measure, spec)  # type: ignore[arg-type]
    return measure


def test_cost_model_finds_both_links() -> None:
    spec = AllReduceSpec(world_size=4, nbytes=2**24, algorithm="hierarchical", node_size=2)
    measure = measured_on(2, (1, 2, 4), spec)
    for place, (message_seconds, byte_seconds) in (("inside", INSIDE), ("between", BETWEEN)):
        assert measure.metrics[f"{place}_message_seconds"]["A1"] == pytest.approx(message_seconds, rel=1e-3)
        assert measure.metrics[f"{place}_bytes_per_second"]["A1"] == pytest.approx(1 / byte_seconds, rel=1e-3)
    predicted = [name for name in measure.metrics if name.startswith("predicted_over_measured_")]
    assert len(predicted) == len(SIZES)
    assert all(measure.metrics[name]["A1"] == pytest.approx(1) for name in predicted)
    assert measure.metrics["held_out_error"]["A1"] == pytest.approx(0, abs=1e-3)
    measured = {(spec.algorithm, spec.world_size) for spec in measure.specs}
    assert measured == {("ring", 2), ("ring", 4), ("hierarchical", 4)}


def test_one_rank_per_node_has_one_link() -> None:
    measure = measured_on(1, (1, 2, 3), AllReduceSpec(world_size=3, nbytes=2**24, algorithm="ring"))
    assert measure.metrics["between_message_seconds"]["A1"] == pytest.approx(BETWEEN[0], rel=1e-3)
    assert "inside_message_seconds" not in measure.metrics
    assert not measure.notes


def test_algorithms_of_one_node_are_all_modelled() -> None:
    assert len(modelled(4, 2**20, Links(node=4))) == 5
    assert [call.algorithm for call in modelled(4, 2**20, Links(node=1))] == ["ring"]
