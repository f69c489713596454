"""The suite's options: declared to pytest, checked once, and from then on one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpperf.plugin.dataset import Data, prepare
from ddpperf.plugin.model_check import check_model
from ddpperf.plugin.option_values import (
    check_benchmark_options,
    check_global_batch_sizes,
    check_world_sizes,
    default_world_sizes,
    folder,
    read_replicates,
    seconds,
    sizes,
    slower_ratio,
    whole_number,
)
from ddpperf.plugin.sides import Sides, add_side_options, has_sides, read_candidate_fields, read_sides
from ddpperf.plugin.spec_options import FIELDS, Value, check_candidate, check_training, fitting, read_forms, read_spec_fields
from ddpperf.specs import EpochSpec, Form, Input, Precision, TrainingSpec, is_own_model, require_model
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.specs.strategy import SHARDED_STRATEGIES

GPU_PRECISIONS = ("tf32", "fp16")  # which the CPU has not
CPU_EPOCH_IMAGES = 1024
GPU_INDUCTOR = "combo_kernels"  # what is small is launched together: 8 % of a step of 32 images
CIFAR_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how, every default resolved for this machine.

    batch_sizes: images a rank. batch_sweep: on one device. global_batch_sizes: shared by all ranks. forms: the first one is
    every experiment's, the others stand beside it. spec_fields: what --spec sets in every cell that has it. delay_seconds: put
    into every step. replicates: process sets a side, None for as many as the run needs. sides: of an A/B run.
    """

    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_sweep: tuple[int, ...]
    global_batch_sizes: tuple[int, ...]
    model: str
    precision: Precision
    forms: tuple[Form, ...]
    spec_fields: Mapping[str, Value]
    data: Data
    epoch_images: int
    delay_seconds: float
    rounds: int
    replicates: int | None
    sides: Sides | None
    deadline_seconds: float
    worker_logs: Path | None
    slower_ratio: float | None

    @property
    def input(self) -> Input:
        """Where a step's batches come from: on GPUs from the data set on the device, augmented there, in every form."""
        return "device" if self.device == "cuda" and not is_own_model(self.model) else "fixed"

    @property
    def fastest_form(self) -> Form:
        return "compile-graph" if "compile-graph" in self.forms else self.forms[0]

    def step(self, **fields: Any) -> TrainingSpec:
        """A step with these fields, the others as the options say, where --spec outdoes both; world_size must be among them.

        Without a strategy it is "single" for one rank, else "ddp", or what --spec names.
        """
        return TrainingSpec(**self._fields(fields))

    def epoch(self, **fields: Any) -> EpochSpec:
        """An epoch of such steps."""
        return EpochSpec(**self._fields(fields))

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        alone = fields["world_size"] == 1
        strategy = "single" if alone else self.spec_fields.get("strategy", "ddp")
        fields = {"strategy": strategy, "form": self.forms[0], **fields}
        channels_last = self.device == "cuda" and fields["strategy"] not in SHARDED_STRATEGIES and not is_own_model(self.model)
        common: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "memory_format": "channels_last" if channels_last else "contiguous",
            "data": self.data.name,
            "digest": self.data.digest,
            "epoch_images": self.epoch_images,
            "inductor": GPU_INDUCTOR if self.device == "cuda" and fields["form"] == "compile-graph" else "",
        } | fields
        return common | fitting(self.spec_fields, fields["strategy"], fields["form"])


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddpperf", "performance of data-parallel training")
    for name, default, metavar, text in (
        ("--device", "auto", "NAME", "cuda, cpu or auto (default: cuda where there are GPUs)"),
        ("--world-sizes", None, "N,N", "numbers of ranks (default: 1,2 on the CPU; 1,2,4,... and all on GPUs)"),
        ("--batch-sizes", None, "N,N", "images a rank in a step (default: 32 on the CPU; 32,128,512 on GPUs; "
         "in test_batch_size 32,128,512,2048)"),
        ("--global-batch-sizes", None, "N,N", "images of all ranks in a step (default: 64 on the CPU; 128,512 on GPUs)"),
        ("--model", None, "NAME", "resnet18 (default on the CPU), resnet18_cifar (on GPUs), resnet50_cifar, torchvision:NAME, "
         "or your own by package.module:function"),
        ("--precision", None, "NAME", f"{', '.join(get_args(Precision))} (default: fp32 on the CPU, bf16 on GPUs)"),
        ("--forms", None, "NAME,NAME", "eager, compile, graph, compile-graph: the first is every experiment's, others stand "
         "beside it in test_forms and test_weak_scaling (default: eager on the CPU; graph,compile-graph,eager on GPUs)"),
        ("--data", "synthetic", "NAME", "synthetic (default), cifar10[:DIR], or imagefolder:DIR with train/ and test/"),
        ("--epoch-images", None, "N", "images in an epoch (default: all of the data set on GPUs, 1024 on the CPU)"),
        ("--slow-down", None, "SECONDS", "put a delay into every step, of two sides the candidate's, to see what notices it"),
        ("--rounds", None, "N", "timed rounds of each cell, of an epoch as many as fill 3 s (default: 10, of two sides 7)"),
        ("--replicates", None, "N", "process sets a side that measure each test, side by side (default: 1; of two sides 3)"),
        ("--deadline", "120", "SECONDS", "how long a rank may take over a command, or be silent in it (default: %(default)s)"),
        ("--worker-logs", None, "DIR", "keep every rank's output in this folder, a file each"),
    ):  # fmt: skip
        group.addoption(name, default=default, metavar=metavar, help=text)
    group.addoption("--verdict", metavar="FILE", help="write the verdict and the table as Markdown")
    add_side_options(group)
    group.addoption("--spec", action="append", default=[], metavar="FIELD=VALUE", help="set a field of every training "
                    f"that has it: {', '.join(FIELDS)}; again for another field")  # fmt: skip


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """The options as given; raises pytest.UsageError with one sentence for what cannot be done here.

    Decodes the images and tries the model, which takes a while, where they are not the default.
    """
    check_benchmark_options(config)
    device = _device(config, gpu_count)
    cuda = device == "cuda"
    world_sizes = sizes(config, "--world-sizes") or default_world_sizes(device, gpu_count)
    check_world_sizes(world_sizes, device, gpu_count)
    batch_sizes, global_batch_sizes = sizes(config, "--batch-sizes"), sizes(config, "--global-batch-sizes")
    check_global_batch_sizes(global_batch_sizes, world_sizes)
    precision = _precision(config, cuda)
    rounds = whole_number("--rounds", config.getoption("rounds") or ("7" if has_sides(config) else "10"))
    deadline_seconds = seconds("--deadline", config.getoption("deadline"), 86400)
    logs, delay = config.getoption("worker_logs"), config.getoption("slow_down")
    delay_seconds = seconds("--slow-down", delay, MOST_DELAY_SECONDS) if delay is not None else 0.0
    worker_logs = folder("--worker-logs", logs) if logs else None
    limit, replicates = slower_ratio(config), read_replicates(config)
    batch_sweep = batch_sizes or (32, 128, 512, 2048)
    batch_sizes = batch_sizes or ((32, 128, 512) if cuda else (32,))
    model = _model_name(config, cuda)
    spec_fields = read_spec_fields(config.getoption("spec"))
    base = {"model": model, "precision": precision, "world_size": max(world_sizes)}
    check_training(base, batch_sizes, spec_fields, config.getoption("forms"), device)
    check_candidate(base, batch_sizes, spec_fields, read_candidate_fields(config), config.getoption("forms"), device)
    # from here on it takes a while
    data, epoch_images = _data(config, model, cuda, max(world_sizes))
    check_model(model, min(2, min(batch_sizes) // int(spec_fields.get("accumulation_steps", 1))))
    return Options(
        device=device,
        world_sizes=world_sizes,
        batch_sizes=batch_sizes,
        batch_sweep=batch_sweep,
        global_batch_sizes=global_batch_sizes or ((128, 512) if cuda else (64,)),
        model=model,
        precision=precision,
        forms=read_forms(config.getoption("forms"), device),
        spec_fields=spec_fields,
        data=data,
        epoch_images=epoch_images,
        delay_seconds=delay_seconds,
        rounds=rounds,
        replicates=replicates,
        sides=read_sides(config, device=device, model=model, delay_seconds=delay_seconds),
        deadline_seconds=deadline_seconds,
        worker_logs=worker_logs,
        slower_ratio=limit,
    )


def _device(config: pytest.Config, gpu_count: int) -> str:
    device = config.getoption("device")
    if device not in ("auto", "cpu", "cuda"):
        raise pytest.UsageError(f"--device must be auto, cpu or cuda, got {device!r}; pass one of them")
    if device == "auto":
        return "cuda" if gpu_count else "cpu"
    return str(device)


def _precision(config: pytest.Config, cuda: bool) -> Precision:
    given: Any = config.getoption("precision")
    if given is None:
        given = "bf16" if cuda else "fp32"
    if given not in get_args(Precision):
        raise pytest.UsageError(f"--precision must be one of {', '.join(get_args(Precision))}, got {given!r}; pass one of them")
    if given in GPU_PRECISIONS and not cuda:
        raise pytest.UsageError(f"--precision {given} needs a GPU, this runs on the CPU; pass fp32 or bf16")
    precision: Precision = given
    return precision


def _model_name(config: pytest.Config, cuda: bool) -> str:
    given = config.getoption("model")
    model: str = given if given is not None else "resnet18_cifar" if cuda else "resnet18"
    try:
        require_model(model)
    except ValueError as error:
        raise pytest.UsageError(f"--model: {error}; name one of these") from error
    return model


def _data(config: pytest.Config, model: str, cuda: bool, most_ranks: int) -> tuple[Data, int]:
    """The images, and how many of them an epoch has."""
    if is_own_model(model) and config.getoption("data") != "synthetic":
        raise pytest.UsageError(f"--model {model} makes its own batches, got --data, too; leave one of them out")
    data = prepare(config.getoption("data"), config.rootpath / ".ddpperf" / "data", lambda line: print(f"ddpperf: {line}"))
    if model.endswith("_cifar") and data.classes > CIFAR_CLASSES:
        raise pytest.UsageError(
            f"--model {model} has {CIFAR_CLASSES} outputs, {data.name} {data.classes} classes; pass --model resnet18"
        )
    given = config.getoption("epoch_images")
    if given is None:
        return data, data.train_images if cuda else min(CPU_EPOCH_IMAGES, data.train_images)
    count = whole_number("--epoch-images", given)
    if not most_ranks <= count <= data.train_images:
        raise pytest.UsageError(
            f"--epoch-images takes {most_ranks} to {data.train_images} images, an image a rank and what the data set "
            f"{data.name} has, got {count}; pass another number"
        )
    return data, count


def is_experiment(test: str) -> bool:
    """Whether a test id is an experiment's, by its file: one in a folder called perf."""
    return "perf" in Path(test.split("::")[0]).parts
