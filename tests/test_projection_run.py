"""perf/test_projection.py on real process groups: from two ranks to three, which were measured, and to four, which were not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.project import Project

RUN = ("--world-sizes", "1,2,3", "--batch-sizes", "8", "--model", "resnet10_cifar", "--project-to", "4", "--node-size", "4")


def slowest_rank(leg: dict[str, Any]) -> float:
    """Seconds a step of the rank whose median round, the second of three, is the longest."""
    ((rounds, iterations),) = [(each["seconds"], leg["iterations"]) for each in leg["samples"]]
    longest = max(sorted(of_rank)[1] for of_rank in zip(*rounds, strict=True))
    return float(longest / iterations)


def test_the_excess_on_all_ranks_is_projected_from_fewer_and_from_all_beyond(project: Project) -> None:
    project.experiment.write_text("from perf.test_projection import test_projection\n")
    run = project.run("perf", *RUN, within_seconds=200)
    assert run.status == 0, run
    ((name, stored),) = project.measured().items()
    assert name.startswith("test_projection[world_size=3-")
    value = {name: metric["value"] for name, metric in stored["metrics"].items()}
    t = {name: slowest_rank(stored["legs"][name]) for name in ("one_device", "world_size=2", "world_size=3")}
    assert value["excess_seconds"] == pytest.approx(t["world_size=3"] - t["one_device"])
    assert value["plain_excess_seconds"] == pytest.approx(t["world_size=2"] - t["one_device"])
    assert value["projection_error"] == pytest.approx(value["projected_excess_on_3"] / value["excess_seconds"] - 1)
    for N in (3, 4):
        low, high = (value[f"projected_excess_on_{N}_{end}"] for end in ("low", "high"))
        assert low <= value[f"projected_excess_on_{N}"] <= high
    assert value["projected_efficiency_on_4"] == pytest.approx(
        t["one_device"] / (t["one_device"] + value["projected_excess_on_4"])
    )
    assert "projected_efficiency_on_3" not in value, "it was measured"
