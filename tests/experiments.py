"""This repository's own experiments at their smallest: a run of them, and the figures that its raw samples make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from tests.project import REPOSITORY, Project

IMAGES = 50  # an epoch's: no multiple of the batch, so that there is a rest to drop

Stored = dict[str, Any]


class Run:
    """A run of perf/: its exit status, what it printed, and what it stored of each test, by the test's name with its cell."""

    def __init__(self, root: Path) -> None:
        self.traces = root / "traces"
        self.status, self.output = json.loads((root / "finished.json").read_text())
        (saved,) = root.glob(".ddpperf/runs/*/*.json")
        document = json.loads(saved.read_text())
        self.header = document["ddpperf"]
        self.stored = {each["name"]: each["extra_info"]["ddpperf"] for each in document["benchmarks"]}

    def of(self, test: str, part: str = "") -> list[Stored]:
        """What was stored of a test's cells that have `part` in their ids; at least one."""
        found = [each for name, each in self.stored.items() if name.startswith(f"{test}[") and part in name]
        assert found, self.stored.keys()
        return found

    def one(self, test: str, part: str = "") -> Stored:
        (found,) = self.of(test, part)
        return found


def project_of_experiments(root: Path) -> Project:
    """A project whose experiments are this repository's own."""
    project = Project(root)
    project.experiment.unlink()
    for path in (*(REPOSITORY / "perf").glob("*.py"), *(REPOSITORY / "perf").glob("recipes.*")):
        shutil.copy(path, root / "perf")
    return project


def measure(root: Path) -> None:
    """Run perf/ in `root`, and leave there what a Run is read from."""
    project = project_of_experiments(root)
    sizes = [
        "--world-sizes",
        "1,2",
        "--batch-sizes",
        "8",
        "--global-batch-sizes",
        "16",
        "--epoch-images",
        str(IMAGES),
    ]
    try:
        finished = project.run("perf", *sizes, "--rounds", "1", "--traces", "traces")
        (root / "finished.json").write_text(json.dumps([finished.status, finished.output]))
    finally:
        project.clean()


def seconds(stored: Stored) -> float:
    """The median over rounds of the slowest rank's seconds of a step, from the raw samples."""
    rounds = [max(ranks[: stored["spec"]["world_size"]]) for ranks in stored["samples"][0]["seconds"]]
    return float(median(rounds)) / int(stored["iterations"])


def slowest_device(stored: Stored, devices: int) -> float:
    """The greatest of the devices' own medians, of ranks that worked in turn."""
    rounds = stored["samples"][0]["seconds"]
    return max(float(median(ranks[device] for ranks in rounds)) for device in range(devices)) / int(
        stored["iterations"]
    )


def metric(stored: Stored, name: str) -> float:
    value: float = stored["metrics"][name]["value"]
    assert stored["metrics"][name]["by_set"] == {"A1": value}
    return value


def steps_of(stored: Stored) -> int:
    """Steps of an epoch: whole batches of a rank's whole share of the images."""
    share = IMAGES // stored["spec"]["world_size"]
    return int(share // stored["spec"]["per_rank_batch_size"])
