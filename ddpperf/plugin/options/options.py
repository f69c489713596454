"""The options of a run: read from the command line, with the defaults of this machine, and checked.

Reading changes nothing.
"""

from __future__ import annotations

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
from ddpperf.data.cache import prepare as prepare_data
from ddpperf.errors import Refused
from ddpperf.io.secret_values import shown_value, shown_word
from ddpperf.machine.hardware import Links
from ddpperf.machine.network import Interface, find_interface
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.benchmark_options import check_benchmark_options, check_root, slower_ratio
from ddpperf.plugin.options.option_table import OLD_OPTIONS, OPTIONS, Value, WrongValue
from ddpperf.plugin.options.spec_fields import fitting
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
from ddpperf.specs.strategy_fields import COMPILED_EXECUTIONS, DDP_OPTIONS, SHARDED_STRATEGIES
from ddpperf.workers.interpreter import Side, rank_environment

GPU_INDUCTOR = "combo_kernels"  # joins small kernels, which makes a step at batch size 32 8% faster
CPU_EPOCH_IMAGES = 512
ROUNDS, AB_ROUNDS = 10, 7
CPU_NODE_SIZE = 2  # ranks
GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have
CIFAR_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a run on several nodes.

    count: the number of nodes. size: the number of ranks of each node. interface: the network
    interface to the other nodes; None on one node. launcher: the command that starts the ranks; None
    to start them on this machine.
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
    batch_sizes: images per rank and step.
    global_batch_sizes: images of all ranks per step.
    executions: execution modes; the first one is used by every experiment.
    spec_fields: training fields that --spec sets.
    data_source: the text of --data.
    images: the data set; None until `prepare_images`.
    requested_epoch_images: the number of --epoch-images; None for the default.
    delay_seconds: an artificial delay of every step, the field delay_seconds of --spec.
    replicates: number of process sets per side; None for the default.
    max_seconds: the time after which no second repeated measurement begins, and an A/B run that has a
    worse test ends.
    slower_ratio: the limit of --benchmark-compare-fail.
    functions: the user's functions that the collected tests measure.
    nodes: the options of a run on several nodes.
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
    functions: tuple[str, ...] = ()
    nodes: NodeOptions = NodeOptions()

    @property
    def confirm_seconds(self) -> float:
        """The most seconds that the first measurement of a confirmation takes."""
        return self.max_seconds / 2

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


def default_world_sizes(device: str, gpu_count: int, nodes: int = 1, node_size: int = 0) -> tuple[int, ...]:
    """Return the default numbers of ranks: 1 and 2 on the CPU, and 1, 2, 4, ... on GPUs.

    On GPUs, the number of all GPUs is included. On several nodes of `node_size` ranks, the numbers
    up to one node are followed by 2, 4, ... and all whole nodes.
    """
    inside = _powers_and(node_size or (2 if device == "cpu" else gpu_count)) or (1,)
    return (*inside, *(inside[-1] * count for count in _powers_and(nodes) if count > 1))


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

    Raises Refused for options that cannot be used together. `prepare` makes the slow checks later.
    """
    names = OPTIONS | OLD_OPTIONS
    given = {name: value for name in names if (value := config.getoption(name)) not in (None, [])}
    for value in given.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, WrongValue):
                raise Refused(part)
    check_benchmark_options(config, given.keys())
    device = given.get("--device", "auto")
    if device == "auto":
        device = "cuda" if gpu_count else "cpu"

    values = {name: option.default_on(device) for name, option in OPTIONS.items()} | given
    nodes = _nodes(given, values, device, gpu_count)
    world_sizes = given.get("--world-sizes") or default_world_sizes(
        device, gpu_count, nodes.count, nodes.size if nodes.count > 1 else 0
    )
    fields = {name: value for (_, name), value in _named(given, "--spec").items()}
    delay_seconds = fields.pop("delay_seconds", 0.0)
    sides = _sides(given)
    if sides is not None:
        check_root(config)
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
        images=prepare_data("synthetic", Path(), print) if values["--data"] == "synthetic" else None,
        requested_epoch_images=given.get("--epoch-images"),
        delay_seconds=delay_seconds,
        rounds=given.get("--rounds", ROUNDS if sides is None else AB_ROUNDS),
        replicates=given.get("--replicates"),
        sides=sides,
        max_seconds=values["--max-seconds"],
        deadline_seconds=values["--deadline"],
        worker_logs=Path(given["--worker-logs"]) if "--worker-logs" in given else None,
        slower_ratio=slower_ratio(config),
        links=_links(given, nodes.size if nodes.count > 1 else max(world_sizes)),
        nodes=nodes,
    )
    check_options(options, gpu_count, compares=bool(config.getoption("benchmark_compare")))
    return options


def _nodes(given: dict[str, Any], values: Mapping[str, Any], device: str, gpu_count: int) -> NodeOptions:
    """Return the options of a run on several nodes, or of one whose ranks a launcher starts."""
    count, launcher = values["--nodes"], given.get("--launcher")
    if count == 1:
        if "--interface" in given:
            raise Refused("--interface is only for runs on several nodes; pass --nodes 2, or remove it")
        return NodeOptions(launcher=launcher)
    if launcher is None and "SLURM_JOB_ID" in os.environ:
        launcher = "srun"
    if launcher is None:
        raise Refused(f"--nodes {count} needs --launcher; pass srun, mpirun or a command (docs/nodes.md)")
    usual = CPU_NODE_SIZE if device == "cpu" else gpu_count
    if device == "cpu" and (requested := given.get("--world-sizes")):
        usual = -(-max(requested) // count)
    return NodeOptions(
        count=count,
        size=given.get("--node-size", max(1, usual)),
        interface=find_interface(given.get("--interface")),
        launcher=launcher,
    )


def _sides(given: dict[str, Any]) -> Sides | None:
    """Return the base and the candidate of an A/B run, or None if neither option is given."""
    if given.keys().isdisjoint(("--base", "--candidate")):
        return None
    base, candidate = _named(given, "--base"), _named(given, "--candidate")
    for kind, name in base:
        if kind == "field":
            raise Refused(
                f"--base takes no training field, got {name}; --spec {name}={base[kind, name]} sets it for "
                f"base and candidate, and --candidate {name}=... for the candidate"
            )
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


def _named(given: dict[str, Any], option: str) -> dict[tuple[str, str], Any]:
    """Return the values of a repeated option by kind and name; nothing may be named twice."""
    found: dict[tuple[str, str], Any] = {}
    for kind, name, value in given.get(option, ()):
        if (kind, name) in found:
            values = " and ".join(shown_value(name, str(text)) for text in (found[kind, name], value))
            raise Refused(f"{option} names {f'{name} twice' if name else f'two {kind}s'}, {values}; name one")
        found[kind, name] = value
    return found


def _links(given: dict[str, Any], most_devices: int) -> Links:
    latency, bandwidth = given.get("--node-link", (0.0, 0.0))
    return Links(
        node=given.get("--node-size", most_devices),
        network=Network(latency=latency, bandwidth=bandwidth) if bandwidth else None,
        project_to=given.get("--project-to", ()),
        buffer_sizes=given.get("--buffer-sizes", ()),
    )


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
    _check_variables(options)
    _check_trainings(options, "--spec", options.spec_fields, options.executions)
    if options.sides is not None and options.sides.spec_fields:
        fields: dict[str, Any] = {**options.spec_fields, **options.sides.spec_fields}
        executions = (fields.pop("execution"),) if "execution" in fields else options.executions
        _check_trainings(options, "--candidate", fields, executions)
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
    if nodes.count > 1:
        _check_nodes(options, gpu_count)
    elif options.device == "cuda" and largest > gpu_count:
        fitting = ",".join(map(str, default_world_sizes("cuda", gpu_count)))
        instead = f"--world-sizes {fitting} or --device cpu" if gpu_count else "--device cpu"
        gpus = "1 GPU" if largest == 1 else f"{largest} GPUs"
        raise Refused(f"world_size={largest} needs {gpus}, found {gpu_count}; pass {instead}")
    for images, ranks in product(options.global_batch_sizes, options.world_sizes):
        if "--global-batch-sizes" in options.given and images % ranks:
            instead = f"a multiple of {ranks}, or other --world-sizes"
            raise Refused(f"--global-batch-sizes {images} does not divide over {ranks} ranks; pass {instead}")


def _check_nodes(options: Options, gpu_count: int) -> None:
    nodes = options.nodes
    if options.device == "cuda" and nodes.size > gpu_count:
        instead = f"--node-size {gpu_count} or less" if gpu_count else "--device cpu"
        found = f"needs {nodes.size} GPUs on each node, found {gpu_count} here"
        raise Refused(f"--node-size {nodes.size} {found}; pass {instead}")
    for N in options.world_sizes:
        if nodes.size < N and (N % nodes.size or nodes.size * nodes.count < N):
            what = f"--world-sizes {N} does not fit {nodes.count} nodes of {nodes.size} ranks"
            fitting = f"at most {nodes.size}, or a multiple of {nodes.size} up to {nodes.size * nodes.count}"
            raise Refused(f"{what}; pass {fitting}, or change --nodes or --node-size")


def _check_links(options: Options) -> None:
    links, most, node = options.links, max(options.world_sizes), options.links.node
    if node < most and options.nodes.count == 1:
        raise Refused(f"--node-size {node} is less than the {most} devices of this run; pass {most} or more")
    for N in links.project_to:
        if N == 1:
            raise Refused("--project-to 1 is a single device, which needs no prediction; pass 2 or more")
        if node < N and most <= node and links.network is None:
            raise Refused(f"--project-to {N} is more than one node of {node} devices; pass --node-link")
        if node < N and N % node:
            whole = f"whole nodes of {node} devices; pass a multiple of {node}"
            raise Refused(f"--project-to {N} fills no {whole}")


def _check_variables(options: Options) -> None:
    """Raise Refused if the candidate only sets variables that have the same values in the base."""
    if (sides := options.sides) is None or not sides.candidate.environment:
        return
    base = {**rank_environment(options.device), **sides.base.environment}
    candidate = sides.candidate.environment
    same_code = (sides.base.python, sides.base.root) == (sides.candidate.python, sides.candidate.root)
    if same_code and not sides.changes_specs and candidate.items() <= base.items():
        variable = shown_word("=".join(next(iter(candidate.items()))))[:60]
        raise Refused(f"--candidate {variable} changes nothing: the base has it, too; pass another value")


def _check_trainings(
    options: Options, option: str, given: Mapping[str, Value], executions: tuple[str, ...]
) -> None:
    """Check that the trainings are possible in each execution mode and with each batch size.

    option: the command-line option that set the given fields.
    """
    world_size, inductor = max(options.world_sizes), given.get("inductor")
    if inductor and not set(COMPILED_EXECUTIONS).intersection(executions):
        found = f"got {', '.join(executions)}; pass --executions compile"
        raise Refused(f"{option} inductor={inductor} needs a compiled execution, {found}")
    for name in ("strategy", "sync_batch_norm", *DDP_OPTIONS):
        if name in given and world_size == 1:
            instead = "got --world-sizes 1; pass --world-sizes 1,2"
            raise Refused(f"{option} {name}={given[name]} needs several ranks, {instead}")
    for execution, batch_size in product(executions, options.batch_sizes):
        fields: dict[str, Any] = {
            "model": options.model,
            "precision": options.precision,
            "world_size": world_size,
            "strategy": "single" if world_size == 1 else "ddp",
            "per_rank_batch_size": batch_size,
            "epoch_images": world_size * batch_size,
            **given,
            "execution": execution,
            "inductor": inductor or "" if execution in COMPILED_EXECUTIONS else "",
        }
        try:
            spec = TrainingSpec(**fields)
        except ValueError as error:
            raise Refused(f"{error}{'' if ';' in str(error) else '; pass another value'}") from error
        if reason := gpu_reason(spec, options.device):
            raise Refused(f"{reason}; pass other --executions or another {option}")
