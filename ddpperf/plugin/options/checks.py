"""Checks that the command-line options agree with each other and with this machine.

Each check raises Refused with one sentence for the user.
"""

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
from ddpperf.secret_values import shown_word
from ddpperf.specs import TrainingSpec, gpu_reason, is_custom_model
from ddpperf.specs.strategy import COMPILED_EXECUTIONS, DDP_OPTIONS
from ddpperf.workers.interpreter import rank_environment

GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have
CIFAR_CLASSES = 10


def check_options(options: Options, gpu_count: int, *, compares: bool) -> None:
    """Check that the values of all command-line options can be used together.

    compares: whether the run is compared with a stored run.
    """
    _check_world_sizes(options, gpu_count)
    ab_run, sets = options.sides is not None, options.replicates or 1
    if options.precision in GPU_PRECISIONS and options.device != "cuda":
        raise Refused(f"--precision {options.precision} needs a GPU, this runs on the CPU; pass fp32 or bf16")
    if is_custom_model(options.model) and options.data_source != "synthetic":
        raise Refused(f"--model {options.model} makes its own batches, got --data, too; leave one out")
    if options.replicates == 1 and ab_run and not compares:
        raise Refused("--replicates 1 cannot tell a difference from chance in an A/B run; pass 2 or more")
    if options.checkpoints is not None and (ab_run or sets > 1):
        raise Refused("--checkpoints needs one process set, got an A/B run or --replicates; leave one out")
    _check_links(options)
    _check_variables(options)
    _check_trainings(options, "--spec", options.spec_fields, options.executions)
    if options.sides is not None and options.sides.spec_fields:
        fields: dict[str, Any] = {**options.spec_fields, **options.sides.spec_fields}
        executions = (fields.pop("execution"),) if "execution" in fields else options.executions
        _check_trainings(options, "--against-spec", fields, executions)
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
    if options.device == "cuda" and not gpu_count:
        raise Refused("--device cuda needs GPUs on each node, found none here; pass --device cpu")
    if options.device == "cuda" and nodes.size > gpu_count:
        found = f"needs {nodes.size} GPUs on each node, found {gpu_count} here"
        raise Refused(f"--node-size {nodes.size} {found}; pass {max(1, gpu_count)} or fewer")
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
            needed = "--node-latency and --node-bandwidth"
            raise Refused(f"--project-to {N} is more than one node of {node} devices; pass {needed}")
        if node < N and N % node:
            whole = f"whole nodes of {node} devices; pass a multiple of {node}"
            raise Refused(f"--project-to {N} fills no {whole}")


def _check_variables(options: Options) -> None:
    """Raise Refused if --against-env sets only variables that the base has with equal values."""
    if options.sides is None or options.given & {option.name for option in AB_OPTIONS} != {"--against-env"}:
        return
    variables = options.sides.candidate.environment
    if variables.items() <= rank_environment(options.device).items():
        variable = shown_word("=".join(next(iter(variables.items()))))[:60]
        raise Refused(f"--against-env {variable} changes nothing: the base has it, too; pass another value")


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


# --- options of pytest and of pytest-benchmark

_ROUNDS = "--rounds sets how often a test is timed; pass --rounds, or leave the option out"
_WARM_UP = "the ranks always warm up before they are timed; leave the option out"
_RANKS = "the ranks are processes of their own; leave the option out"
WITHOUT_EFFECT = {
    "--benchmark-calibration-precision": _ROUNDS,
    "--benchmark-confidence": _ROUNDS,
    "--benchmark-max-time": _ROUNDS,
    "--benchmark-min-rounds": _ROUNDS,
    "--benchmark-min-time": _ROUNDS,
    "--benchmark-precision": _ROUNDS,
    "--benchmark-warmup": _WARM_UP,
    "--benchmark-warmup-iterations": _WARM_UP,
    "--benchmark-cprofile": _RANKS,
    "--benchmark-cprofile-dump": _RANKS,
    "--benchmark-cprofile-loops": _RANKS,
    "--benchmark-cprofile-top": _RANKS,
    "--benchmark-disable-gc": _RANKS,
    "--benchmark-timer": "the ranks have their own timers; leave the option out",
}
# Options of pytest that only list something, or only set fixtures up.
LISTING_OPTIONS = ("collectonly", "setuponly", "showfixtures", "show_fixtures_per_test")
TABLE_OPTIONS = {
    "--benchmark-columns",
    "--benchmark-group-by",
    "--benchmark-histogram",
    "--benchmark-name",
    "--benchmark-sort",
    "--benchmark-time-unit",
}


def check_benchmark_options(config: pytest.Config, given: Collection[str]) -> None:
    """Raise Refused for pytest-benchmark options that ddpperf does not support."""
    compare, name = config.getoption("benchmark_compare"), "--benchmark-compare"
    ab_run = any(option.name in given for option in AB_OPTIONS)
    if config.getoption("benchmark_storage") != "file://./.benchmarks":
        raise Refused("--benchmark-storage is not used: runs are kept in .ddpperf/runs; leave it out")
    if config.getoption("benchmark_histogram") and importlib.util.find_spec("pygal") is None:
        raise Refused(
            "--benchmark-histogram needs pygal, which is not installed; install it, or leave it out"
        )
    if compare == "" or (isinstance(compare, str) and Path(compare).is_dir()):
        raise Refused(f"{name} takes the word after it, got {compare!r}, no run; put it last")
    if compare and ab_run and "--slow-down" in given:
        raise Refused(f"--slow-down is in no stored run, got {name} and an A/B run; leave one out")
    if compare and any(option.startswith("--against") for option in given):
        raise Refused(f"{name} takes this environment as candidate, got --against, too; leave one out")


def runs_tests(config: pytest.Config) -> bool:
    """Return whether this run runs the collected tests, and does not only list them."""
    return not any(config.getoption(option, False) for option in LISTING_OPTIONS)


def check_measuring_options(config: pytest.Config) -> None:
    """Raise Refused for pytest-benchmark options that cannot apply to tests in worker processes.

    Only options of the command line are refused. Those in a project's configuration may be for
    other benchmarks of the project.
    """
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        raise Refused(
            "--benchmark-disable leaves nothing to measure in a performance test; pass --benchmark-skip to "
            "leave the performance tests out, or --rounds 1 for a short run"
        )
    if found := sorted(_typed(config) & WITHOUT_EFFECT.keys()):
        raise Refused(f"{found[0]} has no effect on performance tests: {WITHOUT_EFFECT[found[0]]}")


def table_options(config: pytest.Config) -> Collection[str]:
    """Return the options of the command line that format or draw pytest-benchmark's own table."""
    return _typed(config) & TABLE_OPTIONS


def _typed(config: pytest.Config) -> set[str]:
    return {str(word).partition("=")[0] for word in config.invocation_params.args}


def slower_ratio(config: pytest.Config) -> float | None:
    """Return the largest allowed ratio of a step time to the baseline's step time, or None.

    The ratio is that of --benchmark-compare-fail. pytest-benchmark's own check prints a traceback,
    ignores missing results, and uses only the last of several limits.
    """
    checks = config.getoption("benchmark_compare_fail") or []
    if not checks:
        return None
    variable = os.environ.get("PYTEST_ADDOPTS", "").split()
    words = [*config.invocation_params.args, *config.getini("addopts"), *variable]
    times = sum(str(word).startswith("--benchmark-compare-fail") for word in words)
    (check, *more) = checks
    if more or times > 1 or not isinstance(check, PercentageRegressionCheck) or check.field != "median":
        raise Refused("--benchmark-compare-fail takes one median:N%, got another or several; pass one")
    if not config.getoption("benchmark_compare"):
        raise Refused("--benchmark-compare-fail needs a baseline to compare with; add --benchmark-compare")
    return 1 + float(check.threshold) / 100


def check_root(config: pytest.Config) -> None:
    """Raise Refused if pytest mistook the value of an option for the project's root folder.

    pytest looks for its root before it knows the options, unless --rootdir or -c names the root.
    """
    if config.option.rootdir or config.option.inifilename:
        return
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0]).resolve()
        if not path.is_relative_to(config.rootpath):
            raise Refused(
                f"pytest took {config.rootpath} for the root of this project, but {path} is outside; "
                "name the tests first, and write options with =, as --against-root=DIR"
            )
