"""The options of a run: read from the command line, with the defaults of this machine, and checked.

Reading changes nothing.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.io.secret_values import shown_word
from ddpperf.machine.hardware import Links
from ddpperf.machine.network import Interface, find_interface
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.benchmark_options import check_benchmark_options, check_root, slower_ratio
from ddpperf.plugin.options.option_table import OLD_OPTIONS, OPTIONS, Value
from ddpperf.plugin.options.spec_fields import changed, fitting
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import (
    EpochSpec,
    Execution,
    Input,
    Precision,
    RunSpec,
    TrainingSpec,
    gpu_reason,
    is_custom_model,
)
from ddpperf.specs.training import SHARDED_STRATEGIES
from ddpperf.workers.interpreter import Side

GPU_INDUCTOR = "combo_kernels"  # joins small kernels, which makes a step at batch size 32 8% faster
CPU_EPOCH_IMAGES = 512
ROUNDS, AB_ROUNDS = 10, 7
CPU_NODE_SIZE = 2  # ranks
GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have
CIFAR_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a run on several nodes.

    size: the number of ranks of each node. interface: the network interface to the other nodes; None
    on one node. launcher: the command that starts the ranks; None to start them on this machine.
    """

    count: int = 1
    size: int = 1
    interface: Interface | None = None
    launcher: str | None = None

    def of(self, world_size: int) -> int:
        """Return the number of nodes on which `world_size` ranks run."""
        return -(-world_size // self.size) if self.count > 1 else 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a test run, which say what is measured, on which devices and how often.

    given: names of the options on the command line.
    batch_sizes: images per rank and step. global_batch_sizes: images of all ranks per step.
    executions: execution modes; the first one is used by every experiment.
    spec_fields: training fields that --spec sets, without delay_seconds.
    images: the data set that `data_source` names; None until `prepare_images`.
    delay_seconds: an artificial delay of every step.
    replicates: number of process sets per side; None for the default.
    max_seconds: the time after which no second repeated measurement begins, and an A/B run that has a
    worse test ends.
    slower_ratio: the limit of --benchmark-compare-fail.
    functions: the user's functions that the collected tests measure.
    """

    given: frozenset[str]
    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...]
    model: str
    precision: Precision
    executions: tuple[Execution, ...]
    spec_fields: Mapping[str, Value]
    data_source: str
    images: Data | None
    requested_epoch_images: int | None
    delay_seconds: float
    rounds: int
    replicates: int | None
    sides: Sides | None
    max_seconds: float
    deadline_seconds: float
    worker_logs: Path | None
    slower_ratio: float | None
    links: Links
    nodes: NodeOptions
    functions: tuple[str, ...] = ()

    @property
    def data(self) -> Data:
        """The data set with the images to train on."""
        assert self.images is not None, "prepare_images comes first"
        return self.images

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


def default_world_sizes(device: str, gpu_count: int, nodes: NodeOptions) -> tuple[int, ...]:
    """Return the default numbers of ranks: 1 and 2 on the CPU, and 1, 2, 4, ... on GPUs.

    On GPUs, the number of all GPUs is included. On several nodes, the numbers up to one node are
    followed by 2, 4, ... and all whole nodes.
    """
    node = nodes.size if nodes.count > 1 else CPU_NODE_SIZE if device == "cpu" else gpu_count
    inside = _powers_and(node) or (1,)
    return (*inside, *(inside[-1] * count for count in _powers_and(nodes.count) if count > 1))


def _powers_and(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `most`, and `most`."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return tuple(sorted({*powers, most} - {0}))


def is_experiment(test: str) -> bool:
    """Return whether a test is a performance test, whose file lies in a folder named perf."""
    return "perf" in Path(test.split("::")[0]).parts


# --- reading


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """Return the options of the command line, with the defaults of this machine.

    Raises Refused for wrong values, and for options that cannot be used together. `prepare` makes the
    slow checks later.
    """
    for name, instead in OLD_OPTIONS.items():
        if (text := config.getoption(name)) is not None:
            raise Refused(f"{name} is gone; {instead.replace('{}', shown_word(text))}")
    given: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if (text := config.getoption(name)) not in (None, []):
            given[name] = [*map(option.value_of, text)] if option.repeated else option.value_of(text)
    check_benchmark_options(config, given.keys())
    device = given.get("--device", "auto")
    if device == "auto":
        device = "cuda" if gpu_count else "cpu"

    values = {name: option.default_on(device) for name, option in OPTIONS.items()} | given
    nodes = _nodes(values, device, gpu_count)
    world_sizes = values["--world-sizes"] or default_world_sizes(device, gpu_count, nodes)
    fields = {name: value for (_, name), value in _named(given, "--spec").items()}
    delay_seconds: Any = fields.pop("delay_seconds", 0.0)
    sides = _sides(given)
    if sides is not None:
        check_root(config)
    latency, bandwidth = values["--node-link"] or (0.0, 0.0)
    options = Options(
        given=frozenset(given),
        device=device,
        world_sizes=world_sizes,
        batch_sizes=values["--batch-sizes"],
        global_batch_sizes=values["--global-batch-sizes"],
        model=values["--model"],
        precision=values["--precision"],
        executions=values["--executions"],
        spec_fields=fields,
        data_source=values["--data"],
        images=Data() if values["--data"] == "synthetic" else None,
        requested_epoch_images=values["--epoch-images"],
        delay_seconds=delay_seconds,
        rounds=values["--rounds"] or (ROUNDS if sides is None else AB_ROUNDS),
        replicates=values["--replicates"],
        sides=sides,
        max_seconds=values["--max-seconds"],
        deadline_seconds=values["--deadline"],
        worker_logs=values["--worker-logs"],
        slower_ratio=slower_ratio(config),
        links=Links(
            node=values["--node-size"] or (nodes.size if nodes.count > 1 else max(world_sizes)),
            network=Network(latency=latency, bandwidth=bandwidth) if bandwidth else None,
            project_to=values["--project-to"] or (),
            buffer_sizes=values["--buffer-sizes"] or (),
        ),
        nodes=nodes,
    )
    check_options(options, gpu_count, compares=bool(config.getoption("benchmark_compare")))
    return options


def _nodes(values: Mapping[str, Any], device: str, gpu_count: int) -> NodeOptions:
    """Return the options of a run on several nodes, or of one whose ranks a launcher starts."""
    count, launcher = values["--nodes"], values["--launcher"]
    if count == 1:
        if values["--interface"]:
            raise Refused("--interface is only for runs on several nodes; pass --nodes 2, or remove it")
        return NodeOptions(launcher=launcher)
    if launcher is None and "SLURM_JOB_ID" in os.environ:
        launcher = "srun"
    if launcher is None:
        raise Refused(f"--nodes {count} needs --launcher; pass srun, mpirun or a command (docs/nodes.md)")
    most = max(values["--world-sizes"] or [count * CPU_NODE_SIZE])
    usual = -(-most // count) if device == "cpu" else max(1, gpu_count)
    interface = find_interface(values["--interface"])
    return NodeOptions(
        count=count, size=values["--node-size"] or usual, interface=interface, launcher=launcher
    )


def _sides(given: Mapping[str, Any]) -> Sides | None:
    """Return the base and the candidate of an A/B run, or None if neither option is given."""
    base, candidate = _named(given, "--base"), _named(given, "--candidate")
    if not base and not candidate:
        return None
    if names := [name for kind, name in base if kind == "field"]:
        raise Refused(f"--base takes no training field, got {names[0]}; pass --spec or --candidate")
    fields = {name: value for (kind, name), value in candidate.items() if kind == "field"}
    delay_seconds = fields.pop("delay_seconds", None)
    return Sides(
        base=_side(BASE, base),
        candidate=_side(CANDIDATE, candidate),
        spec_fields=fields,
        delay_seconds=delay_seconds,
    )


def _side(name: str, named: Mapping[tuple[str, str], Any]) -> Side:
    return Side(
        name=name,
        python=named.get(("interpreter", ""), sys.executable),
        root=Path(named["source tree", ""]) if ("source tree", "") in named else None,
        environment={name: value for (kind, name), value in named.items() if kind == "environment"},
    )


def _named(given: Mapping[str, Any], option: str) -> dict[tuple[str, str], Any]:
    """Return the values of a repeated option by kind and name; nothing may be named twice."""
    found: dict[tuple[str, str], Any] = {}
    for kind, name, value in given.get(option, ()):
        if (kind, name) in found:
            raise Refused(f"{option} names {f'{name} twice' if name else f'two {kind}s'}; name one")
        found[kind, name] = value
    return found


# --- options that cannot be used together


def check_options(options: Options, gpu_count: int, *, compares: bool) -> None:
    """Check that the values of all command-line options can be used together.

    compares: whether the run is compared with a stored run.
    """
    _check_world_sizes(options, gpu_count)
    if options.precision in GPU_PRECISIONS and options.device != "cuda":
        raise Refused(f"--precision {options.precision} needs a GPU, this runs on the CPU; pass fp32 or bf16")
    if is_custom_model(options.model) and options.data_source != "synthetic":
        raise Refused(f"--model {options.model} makes its own batches, got --data, too; leave one out")
    if options.replicates == 1 and options.sides is not None and not compares:
        raise Refused("--replicates 1 cannot tell a difference from chance in an A/B run; pass 2 or more")
    _check_links(options)
    _check_trainings(options)
    if options.images is not None:
        check_images(options)


def check_images(options: Options) -> None:
    """Check that the data set suits the model and has enough images for an epoch."""
    data, ranks, count = options.data, max(options.world_sizes), options.requested_epoch_images
    if options.model.endswith("_cifar") and data.classes > CIFAR_CLASSES:
        found = f"{CIFAR_CLASSES} outputs, {data.name} has {data.classes} classes"
        raise Refused(f"--model {options.model} has {found}; pass --model resnet18")
    if count is not None and not ranks <= count <= data.train_images:
        limits = f"{ranks} to {data.train_images} images: one per rank or more, {data.name} has no more"
        raise Refused(f"--epoch-images takes {limits}, got {count}; pass another number")


def _check_world_sizes(options: Options, gpu_count: int) -> None:
    largest, nodes = max(options.world_sizes), options.nodes
    here = nodes.size if nodes.count > 1 else largest
    if options.device == "cuda" and here > gpu_count:
        what = f"--node-size {here}" if nodes.count > 1 else f"world_size={here}"
        instead = f"at most {gpu_count}, or --device cpu" if gpu_count else "--device cpu"
        gpus = "1 GPU" if here == 1 else f"{here} GPUs"
        raise Refused(f"{what} needs {gpus}, found {gpu_count}; pass {instead}")
    for N in options.world_sizes if nodes.count > 1 else ():
        if nodes.size < N and (N % nodes.size or nodes.size * nodes.count < N):
            what = f"--world-sizes {N} does not fit {nodes.count} nodes of {nodes.size} ranks"
            fitting = f"at most {nodes.size}, or a multiple of {nodes.size} up to {nodes.size * nodes.count}"
            raise Refused(f"{what}; pass {fitting}, or change --nodes or --node-size")
    for images, ranks in product(options.global_batch_sizes, options.world_sizes):
        if "--global-batch-sizes" in options.given and images % ranks:
            instead = f"a multiple of {ranks}, or other --world-sizes"
            raise Refused(f"--global-batch-sizes {images} does not divide over {ranks} ranks; pass {instead}")


def _check_links(options: Options) -> None:
    links, most, node = options.links, max(options.world_sizes), options.links.node
    if node < most and options.nodes.count == 1:
        raise Refused(f"--node-size {node} is less than the {most} devices of this run; pass {most} or more")
    for N in links.project_to:
        if node < N and most <= node and links.network is None:
            raise Refused(f"--project-to {N} is more than one node of {node} devices; pass --node-link")
        if node < N and N % node:
            whole = f"whole nodes of {node} devices; pass a multiple of {node}"
            raise Refused(f"--project-to {N} fills no {whole}")


def _check_trainings(options: Options) -> None:
    """Check that the training fields make trainings that are possible here, and change one of them."""
    known = dataclasses.replace(options, images=options.images or Data(), requested_epoch_images=None)
    sizes = {"world_size": max(options.world_sizes)}
    try:
        steps = [
            known.step(**sizes, per_rank_batch_size=batch_size, execution=execution)
            for execution, batch_size in product(options.executions, options.batch_sizes)
        ]
        dataclasses.replace(steps[0], delay_seconds=options.delay_seconds)
        _require_change("--spec", options.spec_fields, steps, options.device)
        if (sides := options.sides) is not None:
            dataclasses.replace(steps[0], delay_seconds=sides.delay_seconds or 0.0)
            candidates = [changed(step, sides.spec_fields) for step in steps]
            _require_change("--candidate", sides.spec_fields, candidates, options.device)
    except ValueError as error:
        raise Refused(f"{error}{'' if ';' in str(error) else '; pass another value'}") from error


def _require_change(option: str, given: Mapping[str, Value], steps: list[Any], device: str) -> None:
    """Check that the given fields of an option hold for one of the training steps, which run here."""
    for step in steps:
        if reason := gpu_reason(step, device):
            raise Refused(f"{reason}; pass other --executions or another {option}")
    for name, value in given.items():
        if all(getattr(step, name) != value for step in steps):
            raise Refused(f"{option} {name}={value} changes no training of this run; leave it out")
