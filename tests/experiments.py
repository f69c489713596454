"""This repository's experiments with little work, on canned measurements or on real ranks."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from statistics import median
from typing import Any

from ddpperf.specs import (
    BucketReplaySpec,
    EpochPartsSpec,
    MessagesSpec,
    PartsSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    TraceSpec,
    TrainingSpec,
    from_json,
)
from perf.common.recipes import FOLDER  # before the copy of perf/ is imported, which has no common/
from tests.canned import CannedSuite, step_counters, step_seconds
from tests.project import Finished, Project

IMAGES = 50  # of an epoch: no multiple of the batch, so that there is a rest to drop
PARAMETERS = 78_002  # of resnet10_cifar
OPTIONS = (
    *("--model", "resnet10_cifar", "--batch-sizes", "8", "--global-batch-sizes", "16"),
    *("--epoch-images", str(IMAGES), "--buffer-sizes", "4KiB,64KiB,256KiB,1MiB", "--rounds", "1"),
)

Stored = dict[str, Any]


class Run:
    """A finished run: its exit status, what it printed, and what it stored of each test."""

    def __init__(self, project: Project, finished: Finished) -> None:
        self.status, self.output = finished.status, finished.output
        (document,) = project.saved_runs()
        self.header = document["ddpperf"]
        self.stored = {each["name"]: each["extra_info"]["ddpperf"] for each in document["benchmarks"]}
        for stored in self.stored.values():
            for part in (stored, *stored["references"].values()):
                part["spec"] = with_defaults(part["spec"])

    def of(self, test: str, **fields: Any) -> list[Stored]:
        """Return what a test stored of its cases with these fields of the spec; at least one."""
        found = [
            stored
            for name, stored in self.stored.items()
            if name.startswith(f"{test}[") and fields.items() <= stored["spec"].items()
        ]
        assert found, self.stored.keys()
        return found

    def one(self, test: str, **fields: Any) -> Stored:
        """Return what a test stored of its only case with these fields."""
        (found,) = self.of(test, **fields)
        return found


def with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored spec with the fields that were left out because they have their default."""
    spec = from_json(stored)
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)} | stored


def with_experiments(project: Project) -> None:
    """Give the project this repository's experiments."""
    project.experiment.unlink()
    for path in (*FOLDER.glob("*.py"), *FOLDER.glob("recipes.*")):
        shutil.copy(path, project.root / "perf")


def run_experiments(project: Project) -> Run:
    """Run every experiment with little work."""
    with_experiments(project)
    if isinstance(project, CannedSuite):
        project.canned.counters = canned_counters
        project.canned.seconds = canned_seconds
    return Run(project, project.run("perf", "--full", "--world-sizes", "1,2", *OPTIONS))


def canned_seconds(spec: Spec, set_name: str) -> float:
    """Return seconds of a step that differ between strategies, inputs and algorithms."""
    words = (
        getattr(spec, name, "") for name in ("strategy", "comm_hook", "input", "algorithm", "communication")
    )
    other = sum(map(ord, "".join(map(str, words)))) % 17
    return step_seconds(spec, set_name) * (1 + other / 100) * (1 + getattr(spec, "loader_workers", 0) / 50)


def canned_counters(spec: Spec, rank: int) -> Mapping[str, float]:
    """Return counters as ranks count them; rank 1 is the last one to be ready."""
    counters: dict[str, float] = dict(step_counters(spec, rank))
    if isinstance(spec, SamplerSpec):
        rest = spec.epoch_images % spec.world_size
        missing = float(rest if spec.drop_last else 0)
        padded = float(0 if spec.drop_last or not rest else spec.world_size - rest)
        places = 0.01 if spec.set_epoch else 1.0
        return counters | {"missing_images": missing, "repeated_images": padded, "repeated_places": places}
    if not isinstance(spec, TrainingSpec):
        return counters
    seconds = canned_seconds(spec, "")
    nbytes = PARAMETERS * (2.0 if spec.comm_hook == "bf16" else 4.0)
    counters.pop("gradient_bytes", None)
    if spec.strategy in ("ddp", "own_ddp", "zero1", "fsdp"):
        counters["gradient_bytes"] = (
            4.0 * PARAMETERS if isinstance(spec, MessagesSpec) and spec.strategy == "fsdp" else nbytes
        )
    if spec.strategy == "fsdp" and not isinstance(spec, MessagesSpec):
        del counters["gradient_bytes"]
    counters["cpu_seconds"] = seconds
    counters["peak_memory_bytes"] = 1e8
    if isinstance(spec, TraceSpec):
        exposed = (0.2 - 0.1 * rank) * seconds
        counters |= {"comm_seconds": exposed + 0.1 * seconds, "exposed_comm_seconds": exposed}
        counters |= {"compute_seconds": 0.5 * seconds, "copy_seconds": 0.0}
        sending = (f"{kind}_without_waiting_seconds" for kind in ("comm", "all_reduce"))
        counters |= dict.fromkeys(sending, 0.15 * seconds)
        counters |= {"idle_seconds": 0.5 * seconds - exposed, "traced_step_seconds": seconds}
    elif isinstance(spec, PartsSpec):
        parts = {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
        if spec.world_size > 1:  # rank 0 computes its gradients sooner, and waits for rank 1
            parts |= {"backward": 0.35 + 0.05 * rank, "gradient_sync": 0.15 - 0.05 * rank}
        else:
            parts["optimizer"] += 0.1
        if isinstance(spec, EpochPartsSpec):
            seconds /= spec.steps_per_epoch
            parts |= {"loading": 0.06, "data": 0.04}
        counters |= {f"{part}_seconds": fraction * seconds for part, fraction in parts.items()}
        counters["flops"] = 1e9
    elif isinstance(spec, BucketReplaySpec):
        counters["bucket 0"] = nbytes
    elif isinstance(spec, MessagesSpec):
        sent = counters["gradient_bytes"]
        counters |= {"gradients: bytes": sent, "gradients: messages": 1.0}
        counters["parameter_bytes"] = 4.0 * PARAMETERS
        counters |= {"gradients by allreduce: bytes": sent, "gradients by allreduce: messages": 1.0}
    elif isinstance(spec, RunSpec):
        for epoch in range(1, spec.epochs + 1):
            better = 0.02 * epoch + 0.001 * (spec.seed % 7)
            counters |= {f"train_loss_{epoch}": 2.3 - better, f"test_loss_{epoch}": 2.3 - better}
            counters |= {f"train_accuracy_{epoch}": 0.1 + better, f"test_accuracy_{epoch}": 0.1 + better}
            counters[f"train_seconds_{epoch}"] = seconds / spec.epochs
        counters["mirrored_test_accuracy"] = counters[f"test_accuracy_{spec.epochs}"]
    return counters


def seconds(stored: Stored) -> float:
    """Return the median over rounds of the slowest rank's seconds of a step, from the raw samples."""
    rounds = [max(ranks[: stored["spec"]["world_size"]]) for ranks in stored["samples"][0]["seconds"]]
    return float(median(rounds)) / int(stored["iterations"])


def slowest_device(stored: Stored, devices: int) -> float:
    """Return the largest of the devices' own medians, for ranks that worked in turn."""
    rounds = stored["samples"][0]["seconds"]
    medians = [float(median(ranks[device] for ranks in rounds)) for device in range(devices)]
    return max(medians) / int(stored["iterations"])


def metric(stored: Stored, name: str) -> float:
    """Return a metric's value, which is that of the only process set."""
    value: float = stored["metrics"][name]["value"]
    assert stored["metrics"][name]["by_set"] == {"A1": value}
    return value


def steps_of(stored: Stored) -> int:
    """Return the steps of an epoch: the whole batches in a rank's shard."""
    shard = IMAGES // stored["spec"]["world_size"]
    return int(shard // stored["spec"]["per_rank_batch_size"])
