"""The suite's options, as they are declared to pytest, and read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpperf.data.cache import Data, prepare
from ddpperf.plugin.options.links import add_link_options, read_links
from ddpperf.plugin.options.model import check_model
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.sides import add_side_options, has_sides, read_candidate_fields, read_sides
from ddpperf.plugin.options.spec_fields import (
    FIELDS,
    Value,
    check_candidate,
    check_training,
    read_executions,
    read_spec_fields,
)
from ddpperf.plugin.options.values import (
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
from ddpperf.specs import Precision, is_custom_model, require_model
from ddpperf.specs.base import MOST_DELAY_SECONDS

GPU_PRECISIONS = ("tf32", "fp16")  # which the CPU has not
CPU_EPOCH_IMAGES = 1024
CIFAR_CLASSES = 10


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddpperf", "performance of data-parallel training")
    for name, default, metavar, text in (
        ("--device", "auto", "NAME", "cuda, cpu or auto (default: cuda where there are GPUs)"),
        ("--world-sizes", None, "N,N", "numbers of ranks (default: 1,2 on the CPU; 1,2,4,... and all on GPUs)"),
        ("--batch-sizes", None, "N,N", "images a rank in a step (default: 32 on the CPU; 32,128,512 on GPUs; "
         "in test_batch_size 32,128,512, and 2048 on GPUs)"),
        ("--global-batch-sizes", None, "N,N", "images of all ranks in a step (default: 64 on the CPU; 128,512 on GPUs)"),
        ("--model", None, "NAME", "resnet18 (default on the CPU), resnet18_cifar (on GPUs), resnet10_cifar, resnet50_cifar, "
         "torchvision:NAME, or your own by package.module:function"),
        ("--precision", None, "NAME", f"{', '.join(get_args(Precision))} (default: fp32 on the CPU, bf16 on GPUs)"),
        ("--executions", None, "NAME,NAME", "eager, compile, graph, compile+graph: the first is every experiment's, others stand "
         "beside it in test_forms and test_weak_scaling (default: eager on the CPU; graph,compile+graph,eager on GPUs)"),
        ("--data", "synthetic", "NAME", "synthetic (default), cifar10[:DIR], or imagefolder:DIR with train/ and test/"),
        ("--epoch-images", None, "N", "images in an epoch (default: all of the data set on GPUs, 1024 on the CPU)"),
        ("--slow-down", None, "SECONDS", "put a delay into every step, of two sides the candidate's, to see what notices it"),
        ("--rounds", None, "N", "timed rounds of each cell, of an epoch as many as fill 3 s (default: 10, of two sides 7)"),
        ("--replicates", None, "N", "process sets a side that measure each test, side by side (default: 1; of two sides 3)"),
        ("--deadline", "120", "SECONDS", "how long a rank may take over a command, or be silent in it (default: %(default)s)"),
        ("--worker-logs", None, "DIR", "keep every rank's output in this folder, a file each"),
        ("--checkpoints", None, "DIR", "keep in this folder where whole trainings are, and go on from there"),
        ("--traces", None, "DIR", "keep the profiler's traces of test_comm_split in this folder, to look at in Perfetto"),
    ):  # fmt: skip
        group.addoption(name, default=default, metavar=metavar, help=text)
    group.addoption("--verdict", metavar="FILE", help="write the verdict and the table as Markdown")
    add_link_options(group)
    add_side_options(group)
    group.addoption("--spec", action="append", default=[], metavar="FIELD=VALUE", help="set a field of every training "
                    f"that has it: {', '.join(FIELDS)}; again for another field")  # fmt: skip


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """The options as given; raises pytest.UsageError with one sentence for what cannot be done here.

    Tries the sides, decodes the images and tries the model, which takes a while, where they are not the default.
    """
    check_benchmark_options(config)
    device = _device(config, gpu_count)
    cuda = device == "cuda"
    world_sizes = sizes(config, "--world-sizes") or default_world_sizes(device, gpu_count)
    check_world_sizes(world_sizes, device, gpu_count)
    batch_sizes, batch_sweep, global_batch_sizes = _batch_sizes(config, cuda, world_sizes)
    precision = _precision(config, cuda)
    rounds = whole_number("--rounds", config.getoption("rounds") or ("7" if has_sides(config) else "10"))
    deadline_seconds = seconds("--deadline", config.getoption("deadline"), 86400)
    delay = config.getoption("slow_down")
    delay_seconds = seconds("--slow-down", delay, MOST_DELAY_SECONDS) if delay is not None else 0.0
    worker_logs, traces = _kept_in(config, "--worker-logs"), _kept_in(config, "--traces")
    limit, replicates, links = (
        slower_ratio(config),
        read_replicates(config),
        read_links(config, max(world_sizes)),
    )
    checkpoints = _checkpoints(config, replicates)
    model = _model_name(config, cuda)
    base = {"model": model, "precision": precision, "world_size": max(world_sizes)}
    spec_fields = _spec_fields(config, base, batch_sizes, device)
    # from here on it takes a while
    sides = read_sides(config, device=device, model=model, delay_seconds=delay_seconds)
    data, epoch_images = _data(config, model, cuda, max(world_sizes))
    check_model(model, min(2, min(batch_sizes) // int(spec_fields.get("accumulation_steps", 1))))
    return Options(
        device=device,
        world_sizes=world_sizes,
        batch_sizes=batch_sizes,
        batch_sweep=batch_sweep,
        global_batch_sizes=global_batch_sizes,
        model=model,
        model_given=config.getoption("model") is not None,
        precision=precision,
        executions=read_executions(config.getoption("executions"), device),
        spec_fields=spec_fields,
        data=data,
        epoch_images=epoch_images,
        delay_seconds=delay_seconds,
        rounds=rounds,
        replicates=replicates,
        sides=sides,
        deadline_seconds=deadline_seconds,
        worker_logs=worker_logs,
        traces=traces,
        checkpoints=checkpoints,
        slower_ratio=limit,
        links=links,
    )


def _kept_in(config: pytest.Config, option: str) -> Path | None:
    """The folder that an option names, made where it is not there; None where it is not given."""
    text = config.getoption(option)
    return folder(option, text) if text is not None else None


def _checkpoints(config: pytest.Config, replicates: int | None) -> Path | None:
    """That of whole trainings, of which each of several sets would take another's for its own."""
    found = _kept_in(config, "--checkpoints")
    if found is not None and (has_sides(config) or (replicates or 1) > 1):
        raise pytest.UsageError(
            "--checkpoints is of one process set, got two sides or --replicates; leave one of them out"
        )
    return found


def _spec_fields(
    config: pytest.Config, base: dict[str, Any], batch_sizes: tuple[int, ...], device: str
) -> Mapping[str, Value]:
    """What --spec sets, where trainings with it, and the candidate's, are possible."""
    fields, executions = read_spec_fields(config.getoption("spec")), config.getoption("executions")
    check_training(base, batch_sizes, fields, executions, device)
    check_candidate(base, batch_sizes, fields, read_candidate_fields(config), executions, device)
    return fields


def _device(config: pytest.Config, gpu_count: int) -> str:
    device = config.getoption("device")
    if device not in ("auto", "cpu", "cuda"):
        raise pytest.UsageError(f"--device must be auto, cpu or cuda, got {device!r}; pass one of them")
    if device == "auto":
        return "cuda" if gpu_count else "cpu"
    return str(device)


def _batch_sizes(
    config: pytest.Config, cuda: bool, world_sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Of one rank, of one rank in the sweep over them, and of all ranks together."""
    per_rank, all_ranks = sizes(config, "--batch-sizes"), sizes(config, "--global-batch-sizes")
    check_global_batch_sizes(all_ranks, world_sizes)
    return (
        per_rank or ((32, 128, 512) if cuda else (32,)),
        per_rank or ((32, 128, 512, 2048) if cuda else (32, 128, 512)),
        all_ranks or ((128, 512) if cuda else (64,)),
    )


def _precision(config: pytest.Config, cuda: bool) -> Precision:
    given: Any = config.getoption("precision")
    if given is None:
        given = "bf16" if cuda else "fp32"
    if given not in get_args(Precision):
        raise pytest.UsageError(
            f"--precision must be one of {', '.join(get_args(Precision))}, got {given!r}; pass one of them"
        )
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
    if is_custom_model(model) and config.getoption("data") != "synthetic":
        raise pytest.UsageError(
            f"--model {model} makes its own batches, got --data, too; leave one of them out"
        )
    data = prepare(
        config.getoption("data"),
        config.rootpath / ".ddpperf" / "data",
        lambda line: print(f"ddpperf: {line}"),
    )
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
