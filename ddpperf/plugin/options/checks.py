"""Checks of options against each other and against this machine. Each one refuses with one sentence."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.utils import PercentageRegressionCheck

from ddpperf.errors import Refused
from ddpperf.plugin.options.declared import AB_OPTIONS
from ddpperf.plugin.options.options import Options, default_world_sizes
from ddpperf.plugin.options.values import Value
from ddpperf.specs import TrainingSpec, gpu_reason, is_custom_model
from ddpperf.specs.strategy import COMPILED_EXECUTIONS, DDP_OPTIONS
from ddpperf.workers.interpreter import rank_environment

GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have
CIFAR_CLASSES = 10


def check_options(options: Options, gpu_count: int, *, compares: bool) -> None:
    """Check all options against each other. compares: whether the run is compared with a stored one."""
    _check_world_sizes(options, gpu_count)
    for global_batch_size, world_size in product(options.global_batch_sizes, options.world_sizes):
        if "--global-batch-sizes" in options.given and global_batch_size % world_size:
            raise Refused(
                f"--global-batch-sizes {global_batch_size} does not divide over {world_size} ranks; "
                f"pass a multiple of {world_size}, or other --world-sizes"
            )
    if options.precision in GPU_PRECISIONS and options.device != "cuda":
        raise Refused(f"--precision {options.precision} needs a GPU, this runs on the CPU; pass fp32 or bf16")
    if is_custom_model(options.model) and options.data_source != "synthetic":
        raise Refused(
            f"--model {options.model} makes its own batches, got --data, too; leave one of them out"
        )
    if options.replicates == 1 and options.sides is not None and not compares:
        raise Refused("--replicates 1 cannot tell a difference from chance in an A/B run; pass 2 or more")
    if options.checkpoints is not None and (options.sides is not None or (options.replicates or 1) > 1):
        raise Refused(
            "--checkpoints needs a single process set, got an A/B run or --replicates; leave one of them out"
        )
    _check_links(options)
    _check_variables(options)
    _check_trainings(options, "--spec", options.spec_fields, options.executions)
    if options.sides is not None and options.sides.spec_fields:
        fields = {**options.spec_fields, **options.sides.spec_fields}
        execution: Any = fields.pop("execution", None)
        _check_trainings(options, "--against-spec", fields, (execution,) if execution else options.executions)
    if options.images is not None:
        check_images(options)


def check_images(options: Options) -> None:
    """Check the model and the images of an epoch against the data set."""
    data, ranks = options.data, max(options.world_sizes)
    if options.model.endswith("_cifar") and data.classes > CIFAR_CLASSES:
        raise Refused(
            f"--model {options.model} has {CIFAR_CLASSES} outputs, {data.name} has {data.classes} classes; "
            "pass --model resnet18"
        )
    count = options.requested_epoch_images
    if count is not None and not ranks <= count <= data.train_images:
        raise Refused(
            f"--epoch-images takes {ranks} to {data.train_images} images: at least one per rank, at most all of "
            f"{data.name}, got {count}; pass another number"
        )


def _check_world_sizes(options: Options, gpu_count: int) -> None:
    largest = max(options.world_sizes)
    if options.device == "cuda" and largest > gpu_count:
        fitting = ",".join(map(str, default_world_sizes("cuda", gpu_count)))
        instead = f"--world-sizes {fitting} or --device cpu" if gpu_count else "--device cpu"
        gpus = "1 GPU" if largest == 1 else f"{largest} GPUs"
        raise Refused(f"world_size={largest} needs {gpus}, found {gpu_count}; pass {instead}")


def _check_links(options: Options) -> None:
    links, devices = options.links, max(options.world_sizes)
    if links.node < devices:
        raise Refused(
            f"--node-size {links.node} is less than the {devices} devices of this run; pass the size of a whole node"
        )
    if 1 in links.project_to:
        raise Refused("--project-to 1 is a single device, which needs no prediction; pass 2 or more")
    beyond = [devices for devices in links.project_to if devices > links.node]
    if beyond and links.network is None:
        raise Refused(
            f"--project-to {beyond[0]} is more than one node of {links.node} devices; "
            "pass --node-latency and --node-bandwidth"
        )
    if parts := [devices for devices in beyond if devices % links.node]:
        raise Refused(
            f"--project-to {parts[0]} does not fill whole nodes of {links.node} devices; pass a multiple of {links.node}"
        )


def _check_variables(options: Options) -> None:
    """Refuse an A/B run whose only difference is variables that the base has, too."""
    if options.sides is None or options.given & {option.name for option in AB_OPTIONS} != {"--against-env"}:
        return
    variables = options.sides.candidate.environment
    if variables.items() <= rank_environment(options.device).items():
        name, value = next(iter(variables.items()))
        raise Refused(
            f"--against-env {name}={value[:40]} changes nothing, because the base inherits it from this environment; "
            "unset it, or pass another value"
        )


def _check_trainings(
    options: Options, option: str, given: Mapping[str, Value], executions: tuple[str, ...]
) -> None:
    """Check that trainings with the given fields are possible here, in each execution and batch size.

    option: the option that set the fields.
    """
    world_size = max(options.world_sizes)
    if given.get("inductor") and not set(COMPILED_EXECUTIONS).intersection(executions):
        raise Refused(
            f"{option} inductor={given['inductor']} needs a compiled execution, got {', '.join(executions)}; "
            "pass --executions compile"
        )
    for name in ("strategy", "sync_batch_norm", *DDP_OPTIONS):
        if name in given and world_size == 1:
            raise Refused(
                f"{option} {name}={given[name]} needs several ranks, got --world-sizes 1; pass --world-sizes 1,2"
            )
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
        }
        if execution not in COMPILED_EXECUTIONS:
            fields["inductor"] = ""
        try:
            spec = TrainingSpec(**fields)
        except ValueError as error:
            advice = "" if ";" in str(error) else "; pass another value"
            raise Refused(f"{error}{advice}") from error
        if reason := gpu_reason(spec, options.device):
            raise Refused(f"{reason}; pass other --executions or another {option}")


# --- options of pytest and of pytest-benchmark


def check_benchmark_options(config: pytest.Config, given: Collection[str]) -> None:
    """Refuse options of pytest-benchmark that would store runs elsewhere, or fail late."""
    if config.getoption("benchmark_storage") != "file://./.benchmarks":
        raise Refused(
            "--benchmark-storage is not used: runs are kept in .ddpperf/runs and baselines in perf/baselines; leave it out"
        )
    if config.getoption("benchmark_histogram") and importlib.util.find_spec("pygal") is None:
        raise Refused(
            "--benchmark-histogram needs pygal, which is not installed; install it, or leave it out"
        )
    compare = config.getoption("benchmark_compare")
    if compare == "" or (isinstance(compare, str) and Path(compare).is_dir()):
        raise Refused(
            f"--benchmark-compare takes the word after it, got {compare!r}, which is no run; put it last"
        )
    ab_options = [option.name for option in AB_OPTIONS if option.name in given]
    if compare and ab_options and "--slow-down" in given:
        raise Refused(
            "--slow-down is in no stored run, got --benchmark-compare and an A/B run; leave one of them out"
        )
    if compare and any(name.startswith("--against") for name in ab_options):
        raise Refused(
            "--benchmark-compare compares this environment with a stored run, got --against; leave one out"
        )


def slower_ratio(config: pytest.Config) -> float | None:
    """Return the largest ratio to the baseline's time that `--benchmark-compare-fail=median:N%` accepts.

    pytest-benchmark's own check prints a traceback, ignores missing results, and forgets all but the last limit.
    """
    checks = config.getoption("benchmark_compare_fail") or []
    words = [
        *config.invocation_params.args,
        *config.getini("addopts"),
        *os.environ.get("PYTEST_ADDOPTS", "").split(),
    ]
    if not checks:
        return None
    times = sum(str(word).startswith("--benchmark-compare-fail") for word in words)
    (check, *more) = checks
    if more or times > 1 or not isinstance(check, PercentageRegressionCheck) or check.field != "median":
        raise Refused(
            "--benchmark-compare-fail takes one median:N%, got another or several; pass one median:N%"
        )
    if not config.getoption("benchmark_compare"):
        raise Refused("--benchmark-compare-fail needs a baseline to compare with; add --benchmark-compare")
    return 1 + float(check.threshold) / 100


def check_root(config: pytest.Config) -> None:
    """Refuse a run whose root pytest took from a folder among the values of our options.

    pytest looks for its root before it knows these options, unless --rootdir or -c names it.
    """
    if config.option.rootdir or config.option.inifilename:
        return
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0]).resolve()
        if not path.is_relative_to(config.rootpath):
            raise Refused(
                f"pytest took {config.rootpath} for the root of this project, but {path} is outside; name the tests "
                "first, and write options with =, as --against-root=DIR"
            )
