"""What a run on several nodes reports of its nodes, from canned seconds and stored runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddpperf.machine.hardware import Links, Machine
from ddpperf.machine.network import Interface
from ddpperf.plugin.cases import machine_reason
from ddpperf.plugin.device_guard import Devices
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.report.summary import summary_lines
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, Spec, TrainingSpec
from perf.test_comm_split import exposed_by_link
from tests.fake_measure import measuring

LINK = Interface(name="eth0", address="10.0.0.1", link="eth10", bytes_per_second=1.25e9)
LOOPBACK = Interface(name="lo", address="127.0.0.1", link="lo")
TWO_OF_TWO = Machine(interface=LINK, links=Links(node=2), world_sizes=(1, 2, 4))
DDP = TrainingSpec(world_size=4, per_rank_batch_size=2, strategy="ddp")
HERE = {"name": "a", "interface": "eth0", "link": "eth10", "ranks": 2}
OTHER = {"name": "b", "interface": "eth1"}


def canned(seconds: float, spec: Spec) -> Measured:
    sample = Sample(set="A1", side="A", torch="2", seconds=((seconds,) * spec.world_size,))
    return Measured(spec=spec, iterations=1, samples=(sample,))


class CannedMeasure(Measure):
    """A measurement whose step on one node waits 0.1 s."""

    def __init__(self, node_size: int) -> None:
        nothing: Any = None
        two_nodes = dataclasses.replace(TWO_OF_TWO, links=Links(node=node_size))
        super().__init__(nothing, measuring(two_nodes))

    def reference(self, name: str, spec: Spec) -> Measured:
        return canned({"one_node": 1.1, "one_node_no_sync": 1.0}[name], spec)


@pytest.mark.parametrize(
    ("node_size", "found"), [(2, {"inside": 0.1, "between": 0.5}), (1, {"between": 1.6 - 1.04})]
)
def test_other_nodes_add_the_rest_of_exposed_communication(node_size: int, found: dict[str, float]) -> None:
    """Of a step of 1.6 s that waits 0.6 s. A node with one rank sends nothing inside."""
    measure = CannedMeasure(node_size)
    exposed_by_link(measure, canned(1.6, DDP), canned(1.04, DDP.local()), {"A1": 0.6})
    for place in ("inside", "between"):
        name = f"exposed_{place}_node{'s' * (place == 'between')}_seconds"
        assert measure.metrics.get(name, {}).get("value") == (
            pytest.approx(found[place]) if place in found else None
        )


def link_of(interface: Interface | None, device: str = "cpu", **links: Any) -> str:
    return str(Machine(device=device, links=Links(**{"node": 2} | links), interface=interface).link(4))


def test_link_between_nodes_is_the_interfaces() -> None:
    assert link_of(LINK) == "1.25 GB/s (nominal, eth10 between nodes)"
    assert link_of(LOOPBACK, "cuda") == "None", "its rate is unknown, and so are the other node's GPUs"
    network = {"network": type("Network", (), {"bandwidth": 0.5e9})()}
    for interface in (LINK, LOOPBACK):
        assert link_of(interface, **network) == "1 GB/s (given, --node-link of 2 devices)"


def test_usage_across_nodes_is_not_recorded() -> None:
    devices = Devices((), 2, several_nodes=True)
    inside, across = (
        EpochSpec(world_size=N, per_rank_batch_size=8, strategy="ddp", epoch_images=64) for N in (2, 4)
    )
    assert devices.recorder(inside, [], True)._sampler is not None
    assert devices.recorder(across, [], True)._sampler is None
    assert Devices((), 2).recorder(across, [], True)._sampler is not None, "a larger process set"


def test_ranks_of_other_nodes_share_no_cores_here() -> None:
    for several_nodes, warnings in ((False, ["4 processes share 2 cores"]), (True, [])):
        devices = Devices((), 2, several_nodes=several_nodes)
        devices.pinning.ranks, devices.pinning._core_count = None, 2
        assert [note.text for note in devices.warnings(DDP)] == warnings
    assert TWO_OF_TWO.ranks_here(4) == 2
    assert dataclasses.replace(TWO_OF_TWO, interface=None).ranks_here(4) == 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"strategy": "data_parallel"}, "strategy data_parallel drives GPUs from one process, "),
        ({"strategy": "own_ddp", "comm_hook": "symmetric_memory"}, "it maps the memory of all GPUs, "),
    ],
)
def test_work_of_one_machine_is_skipped_across_nodes(fields: dict[str, Any], reason: str) -> None:
    gpus = dataclasses.replace(TWO_OF_TWO, device="cuda")
    spec = dataclasses.replace(DDP, **fields)
    assert machine_reason(spec, gpus).startswith(reason)
    assert not machine_reason(dataclasses.replace(spec, world_size=2), gpus)
    assert not machine_reason(spec, dataclasses.replace(gpus, interface=None))


@pytest.mark.parametrize("nodes", [[HERE, OTHER], []])
def test_nodes_are_named_with_their_link(nodes: list[dict[str, Any]]) -> None:
    header: dict[str, Any] = {
        "hardware_key": "2xcpu2-eth10",
        "environment": {"commit": "nogit", "torch": "2.11"} | ({"nodes": nodes} if nodes else {}),
        "options": {"rounds": 10, "device": "cpu"},
        "outcomes": {},
        "verdict": {"status": "PASS", "reasons": ["good"]},
    }
    lines = " ".join(line.strip() for line in summary_lines({"benchmarks": [], "ddpperf": header}))
    line = "nodes       node 0 (a), node 1 (b): 2 ranks each, connected by eth10; machine checks"
    assert (line in lines) is bool(nodes)
