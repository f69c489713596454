"""The options of a run: read from the command line, with the defaults of this machine, and checked.

Reading changes nothing.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.machine.hardware import Links
from ddpperf.machine.network import Interface, find_interface
from ddpperf.plugin.options.ab_sides import Sides, fitting
from ddpperf.plugin.options.benchmark_options import slower_ratio
from ddpperf.plugin.options.option_table import OPTIONS, Value
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import EpochSpec, Execution, Input, Precision, RunSpec, TrainingSpec, is_custom_model
from ddpperf.specs.training_step import SHARDED_STRATEGIES
from ddpperf.workers.interpreter import Side

GPU_INDUCTOR = "combo_kernels"  # joins small kernels, which makes a step at batch size 32 8% faster
CPU_EPOCH_IMAGES = 512
ROUNDS, AB_ROUNDS = 10, 7
CPU_NODE_SIZE = 2  # ranks
CIFAR_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a test run, which say what is measured, on which devices and how often.

    A field with the name of an option has its value, or the default on this machine.
    """

    given: frozenset[str]  # names of the options on the command line
    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]  # images per rank and step
    global_batch_sizes: tuple[int, ...]  # images of all ranks per step
    model: str
    precision: Precision
    executions: tuple[Execution, ...]  # the first one is used by every experiment
    spec_fields: Mapping[str, Value]  # that --spec sets, without delay_seconds
    script: str | None  # the command of the user's training script
    data_source: str
    data: Data  # of real images, only the name is known before `refused_options.prepare`
    requested_epoch_images: int | None
    delay_seconds: float  # an artificial delay of every step
    rounds: int
    replicates: int | None  # process sets per side; None for the default
    sides: Sides | None
    # After these seconds no test is measured again, but a first repeat may always take a quarter of them.
    max_seconds: float
    deadline: float
    worker_logs: Path | None
    slower_ratio: float | None  # the limit of --benchmark-compare-fail
    links: Links
    nodes: int
    interface: Interface | None  # to the other nodes; None on one node
    launcher: str | None  # the command that starts the ranks; None to start them on this machine
    functions: tuple[str, ...] = ()  # of the user, which the collected tests measure

    @property
    def epoch_images(self) -> int:
        if self.requested_epoch_images is not None:
            return self.requested_epoch_images
        most = self.data.train_images
        return most if self.device == "cuda" else min(CPU_EPOCH_IMAGES, most)

    @property
    def input(self) -> Input:
        """The source of a training step's batches.

        On GPUs, batches are taken from the data set in GPU memory. On CPUs, and for custom models,
        all steps use one fixed batch.
        """
        return "device" if self.device == "cuda" and not is_custom_model(self.model) else "fixed"

    @property
    def fastest_execution(self) -> Execution:
        """The execution mode that is expected to give the fastest training step."""
        return "compile+graph" if "compile+graph" in self.executions else self.executions[0]

    def step(self, **fields: Any) -> TrainingSpec:
        """Return the measurement spec of one training step with the given fields.

        world_size must be given. Other fields have defaults from the options, and --spec overrides
        both. The default strategy is "single" for one rank, and "ddp" for several ranks.
        """
        return TrainingSpec(**self.fields(**fields))

    def epoch(self, **fields: Any) -> EpochSpec:
        """Return the measurement spec of a training epoch with the given fields."""
        return EpochSpec(**self.fields(**fields))

    def run(self, **fields: Any) -> RunSpec:
        """Return the measurement spec of a whole training, with the images in device memory."""
        return RunSpec(**self.fields(**{"input": "device", **fields}))

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a training spec, with defaults from the command-line options."""
        alone = fields["world_size"] == 1
        strategy = "single" if alone else self.spec_fields.get("strategy", "ddp")
        fields = {"strategy": strategy, "execution": self.executions[0], **fields}
        gpu, flat = self.device == "cuda", fields["strategy"] in SHARDED_STRATEGIES
        any_format = gpu and not flat and not is_custom_model(self.model)
        common: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "memory_format": "channels_last" if any_format else "contiguous",
            "data": self.data.name,
            "digest": self.data.digest,
            "epoch_images": self.epoch_images,
            "inductor": GPU_INDUCTOR if gpu and fields["execution"] == "compile+graph" else "",
        } | fields
        return common | fitting(self.spec_fields, fields["strategy"], fields["execution"])


def is_experiment(test: str) -> bool:
    """Return whether a test is a performance test, whose file lies in a folder named perf."""
    return "perf" in Path(test.split("::")[0]).parts


# --- reading


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """Return the options of the command line, with the defaults of this machine.

    Raises Refused for wrong values. `check_combinations` and `prepare` make the other checks.
    """
    given: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if (text := config.getoption(name)) not in (None, []):
            given[name] = option.by_name(text) if option.repeated else option.value_of(text)
    sides = _sides(given.get("--base", {}), given.get("--candidate", {}))
    device = given.get("--device", "auto")
    if device == "auto":
        device = "cuda" if gpu_count else "cpu"

    values = {name: option.default_on(device) for name, option in OPTIONS.items()} | given
    values |= _nodes(values, device, gpu_count)
    fields = given.get("--spec", {})
    read: dict[str, Any] = {
        field.name: values[name]
        for field in dataclasses.fields(Options)
        if (name := f"--{field.name.replace('_', '-')}") in values
    }
    read |= {
        "given": frozenset(given),
        "device": device,
        "delay_seconds": fields.pop("delay_seconds", 0.0),
        "spec_fields": fields,
        "data_source": values["--data"],
        "data": Data(name=values["--data"].partition(":")[0]),
        "requested_epoch_images": values["--epoch-images"],
        "rounds": values["--rounds"] or (ROUNDS if sides is None else AB_ROUNDS),
        "sides": sides,
        "slower_ratio": slower_ratio(config, given),
        "links": Links(
            node=values["--node-size"],
            network=values["--node-link"],
            project_to=values["--project-to"] or (),
            buffer_sizes=values["--buffer-sizes"] or (),
        ),
    }
    return Options(**read)


def _nodes(values: Mapping[str, Any], device: str, gpu_count: int) -> dict[str, Any]:
    """Return the options about nodes, and the world sizes, with defaults for what is not given."""
    nodes, node_size, world_sizes = values["--nodes"], values["--node-size"], values["--world-sizes"]
    launcher, interface = values["--launcher"], None
    if nodes == 1 and values["--interface"]:
        raise Refused("--interface is only for runs on several nodes; pass --nodes 2, or remove it")
    if nodes > 1:
        launcher = launcher or ("srun" if "SLURM_JOB_ID" in os.environ else None)
        if launcher is None:
            raise Refused(f"--nodes {nodes} needs --launcher; pass srun, mpirun or a command (docs/nodes.md)")
        interface = find_interface(values["--interface"])
        cpu_ranks = -(-max(world_sizes) // nodes) if world_sizes else CPU_NODE_SIZE
        node_size = node_size or (cpu_ranks if device == "cpu" else max(1, gpu_count))
    if not world_sizes:
        on_node = node_size if nodes > 1 else CPU_NODE_SIZE if device == "cpu" else max(1, gpu_count)
        world_sizes = default_world_sizes(on_node, nodes)
    return {
        "--world-sizes": world_sizes,
        "--node-size": node_size or max(world_sizes),
        "--interface": interface,
        "--launcher": launcher,
    }


def default_world_sizes(on_node: int, nodes: int) -> tuple[int, ...]:
    """Return the world sizes 1, 2, 4, ... up to one node, and those of 2, 4, ... up to all nodes."""
    inside = {2**exponent for exponent in range(on_node.bit_length())}
    whole = {on_node * 2**exponent for exponent in range(nodes.bit_length())} | {on_node * nodes}
    return tuple(sorted(inside | whole))


def _sides(base: dict[str, Any], candidate: dict[str, Any]) -> Sides | None:
    """Return the base and the candidate of an A/B run, or None if neither is given."""
    if not base and not candidate:
        return None
    sides = [
        Side(
            name=name,
            python=values.pop("interpreter", sys.executable),
            root=values.pop("source tree", None),
            environment={name: values.pop(name) for name in [*values] if name.isupper()},
        )
        for name, values in ((BASE, base), (CANDIDATE, candidate))
    ]
    if base:
        raise Refused(f"--base takes no training field, got {min(base)}; pass --spec or --candidate")
    return Sides(base=sides[0], candidate=sides[1], spec_fields=candidate)
