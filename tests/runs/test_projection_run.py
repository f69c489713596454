"""perf/test_projection.py: from two ranks to three, which are measured, and to four, which are not."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.analysis.projection import Excess
from ddpperf.analysis.statistics import Estimate
from ddpperf.machine.hardware import Links, Machine
from perf.test_projection import compare, projection
from tests.canned import CannedSuite
from tests.experiments import canned_counters
from tests.project import Finished, Project
from tests.unit.test_all_reduce_figures import measure_on

OPTIONS = (
    *("--world-sizes", "1,2,3", "--batch-sizes", "8", "--model", "resnet10_cifar"),
    *("--project-to", "4", "--node-size", "4"),
)


def slowest_of(reference: dict[str, Any], ranks: int) -> float:
    """Return the largest median of the first `ranks`, in seconds of a step, over three rounds."""
    ((rounds, iterations),) = [(each["seconds"], reference["iterations"]) for each in reference["samples"]]
    longest = max(sorted(of_rank)[1] for of_rank in [*zip(*rounds, strict=True)][:ranks])
    return float(longest / iterations)


@pytest.mark.slow
def test_projection_on_real_ranks(project: Project) -> None:
    project.experiment.write_text("from perf.test_projection import test_projection\n")
    assert_projected(project, project.run("perf", *OPTIONS))


def test_projection_from_fewer_devices(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text("from perf.test_projection import test_projection\n")
    canned_suite.canned.counters = canned_counters
    assert_projected(canned_suite, canned_suite.run("perf", *OPTIONS))


def assert_projected(project: Project, run: Finished) -> None:
    """The stored metrics follow from the raw samples, on the devices measured and on more."""
    assert run.status == 0, run
    ((name, stored),) = project.measured().items()
    assert name.startswith("test_projection[3rank-")
    value = {name: metric["value"] for name, metric in stored["metrics"].items()}
    t1, tN = (
        {N: slowest_of(stored["references"][reference.format(N)], N) for N in (2, 3)}
        for reference in ("one_device", "world_size={}")
    )
    assert value["excess_seconds"] == pytest.approx(tN[3] - t1[3])
    assert value["plain_excess_seconds"] == pytest.approx(tN[2] - t1[2]), (
        "of the devices that worked together"
    )
    assert ("projection_error" in value) == (value["excess_seconds"] > 0), (
        "noise may make one device the slower"
    )
    if "projection_error" in value:
        assert value["projection_error"] == pytest.approx(
            value["projected_excess_on_3"] / value["excess_seconds"] - 1
        )
    for N in (3, 4):
        low, high = (value[f"projected_excess_on_{N}_{end}"] for end in ("low", "high"))
        assert low <= value[f"projected_excess_on_{N}"] <= high
    assert value["projected_efficiency_on_4"] == pytest.approx(
        t1[3] / (t1[3] + value["projected_excess_on_4"])
    )
    assert "projected_efficiency_on_3" not in value, "it was measured"


def test_projection_is_compared_with_the_same_excess() -> None:
    measure = measure_on(Machine())
    on_4, on_8 = ({"A1": Excess(seconds=N * 1e-3, error=0.0, one_device_error=0.0)} for N in (4, 8))
    compare(measure, {"A1": Estimate(value=9e-3, low=0.0, high=1.0)}, on_4, on_8)
    assert measure.metrics["plain_excess_seconds"]["value"] == 4e-3
    assert measure.metrics["projection_error"]["value"] == pytest.approx(9 / 8 - 1)
    faster = measure_on(Machine())
    compare(
        faster,
        {"A1": Estimate(value=9e-3, low=0.0, high=1.0)},
        on_4,
        {"A1": on_8["A1"]._replace(seconds=0.0)},
    )
    assert list(faster.metrics) == ["plain_excess_seconds"], "without an excess there is no error of it"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("node", "changes"), [(2, False), (8, True)])
def test_nodes_are_projected_from_nodes_only(node: int, changes: bool, device: str) -> None:
    """With nodes of 2 ranks, an all-reduce on 2 ranks says nothing about 8 ranks."""
    machine = Machine(device=device, links=Links(node=node))
    sizes = [2**10, 2**16, 2**20, 2**24]

    def projected(inside_seconds: float) -> float:
        starts = {2: inside_seconds, 4: 6e-3, 6: 10e-3}
        found = projection(
            machine,
            {N: Excess(seconds=start + 0.05, error=0.0, one_device_error=0.0) for N, start in starts.items()},
            8,
            bucket_copies=Excess(seconds=1e-3, error=0.0, one_device_error=0.0),
            times={N: {nbytes: start + 1e-8 * nbytes for nbytes in sizes} for N, start in starts.items()},
            buckets=[5e6],
            hideable=1.0,
        )
        return found.value

    assert (projected(1e-3) != projected(2e-3)) == changes
