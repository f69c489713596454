"""The values of the suite's options: each checked by itself, and refused with one sentence."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import pytest
from pytest_benchmark.utils import PercentageRegressionCheck

from ddpperf.plugin.options.sides import has_sides, names_candidate
from ddpperf.report.summary import PAGE_BEGINS
from ddpperf.verdict.two_stage_test import MOST_SETS

MAX_WORLD_SIZE = 1024
MOST_DIGITS = 9


def default_world_sizes(device: str, gpu_count: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the GPUs there are, and all of them; 1 and 2 on the CPU."""
    if device == "cpu":
        return (1, 2)
    powers = [2**exponent for exponent in range(gpu_count.bit_length())]
    return tuple(sorted({*powers, gpu_count} - {0})) or (1,)


def check_world_sizes(world_sizes: tuple[int, ...], device: str, gpu_count: int) -> None:
    """Raise pytest.UsageError for more ranks than there are GPUs, or than anyone has."""
    largest = max(world_sizes)
    if device == "cuda" and largest > gpu_count:
        fitting = ",".join(str(size) for size in default_world_sizes(device, gpu_count)) if gpu_count else ""
        instead = f"--world-sizes {fitting} or --device cpu" if fitting else "--device cpu"
        gpus = "1 GPU" if largest == 1 else f"{largest} GPUs"
        raise pytest.UsageError(f"world_size={largest} needs {gpus}, found {gpu_count}; pass {instead}")
    if largest > MAX_WORLD_SIZE:
        raise pytest.UsageError(f"--world-sizes goes up to {MAX_WORLD_SIZE}, got {largest}; pass fewer ranks")


def sizes(config: pytest.Config, option: str) -> tuple[int, ...]:
    text = config.getoption(option)
    if text is None:
        return ()
    sizes = tuple(whole_number(option, word) for word in text.split(","))
    if len(set(sizes)) != len(sizes):
        raise pytest.UsageError(f"{option} names a size twice, got {text!r}; name each once")
    return tuple(sorted(sizes))


def whole_number(option: str, text: str, most: int = 10**MOST_DIGITS - 1) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and 1 <= int(text) <= most):
        raise pytest.UsageError(
            f"{option} takes whole numbers from 1 to {most}, got {text[:40]!r}; pass for example {option} 2"
        )
    return int(text)


def seconds(option: str, text: str, most: float) -> float:
    return positive(option, text, "seconds", most=most, example=0.5)


def positive(option: str, text: str, unit: str, *, most: float, example: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise pytest.UsageError(
            f"{option} takes {unit} above 0 and up to {most:g}, got {text!r}; pass for example {option} {example:g}"
        )
    return value


def verdict_file(text: str | None) -> Path | None:
    """The file of --verdict, without an earlier run's, which nobody may take for this one's.

    Its folder must be there: a slip of the pen is then seen before anything is measured.
    """
    if text is None:
        return None
    path = file_to_write("--verdict", text)
    if path.exists() and not _is_verdict(path):
        raise pytest.UsageError(
            f"--verdict writes its file anew, and {text!r} is no verdict of an earlier run; name another"
        )
    path.unlink(missing_ok=True)
    return path


def file_to_write(option: str, text: str) -> Path:
    """The file that is meant, where links lead; a device or a folder is none. Raises pytest.UsageError."""
    path = Path(text).resolve()
    if not text or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise pytest.UsageError(
            f"{option} takes a file in a folder that can be written, got {text!r}; name another"
        )
    return path


def _is_verdict(path: Path) -> bool:
    """An empty file may become one."""
    try:
        with open(path, "rb") as file:
            begins = file.read(len(PAGE_BEGINS))
    except OSError:
        return False
    return begins in (b"", PAGE_BEGINS.encode())


def folder(option: str, text: str) -> Path:
    folder = Path(text).resolve()
    try:
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise pytest.UsageError(
            f"{option} takes a folder that can be written, got {text!r} ({error.strerror}); name another"
        ) from error
    return folder


def slower_ratio(config: pytest.Config) -> float | None:
    """The limit that `--benchmark-compare-fail=median:N%` sets on a step time's ratio to the baseline's.

    pytest-benchmark's own gate prints a traceback, knows no holes, and forgets all but the last of several.
    """
    checks = config.getoption("benchmark_compare_fail") or []
    words = [
        *config.invocation_params.args,
        *config.getini("addopts"),
        *os.environ.get("PYTEST_ADDOPTS", "").split(),
    ]
    given = sum(str(word).startswith("--benchmark-compare-fail") for word in words)
    if not checks:
        return None
    (check, *more) = checks
    if more or given > 1 or not isinstance(check, PercentageRegressionCheck) or check.field != "median":
        raise pytest.UsageError(
            "--benchmark-compare-fail takes one median:N%, the only limit compared; got another or several"
        )
    if not config.getoption("benchmark_compare"):
        raise pytest.UsageError(
            "--benchmark-compare-fail needs a baseline to compare with; add --benchmark-compare"
        )
    return 1 + float(check.threshold) / 100


def check_global_batch_sizes(global_batch_sizes: tuple[int, ...], world_sizes: tuple[int, ...]) -> None:
    """Raise pytest.UsageError for one that some number of ranks cannot share."""
    for global_batch_size in global_batch_sizes:
        for world_size in world_sizes:
            if global_batch_size % world_size:
                raise pytest.UsageError(
                    f"--global-batch-sizes {global_batch_size} does not divide over {world_size} ranks; "
                    f"pass a multiple of {world_size}, or other --world-sizes"
                )


def check_benchmark_options(config: pytest.Config) -> None:
    """Refuse those of pytest-benchmark's own options that would keep runs elsewhere, or go wrong late."""
    if config.getoption("benchmark_storage") != "file://./.benchmarks":
        raise pytest.UsageError(
            "--benchmark-storage is not used: runs are kept in .ddpperf/runs and baselines in perf/baselines; leave it out"
        )
    if config.getoption("benchmark_histogram") and importlib.util.find_spec("pygal") is None:
        raise pytest.UsageError(
            "--benchmark-histogram needs pygal, which is not installed; install it, or leave that out"
        )
    compare = config.getoption("benchmark_compare")
    if compare == "" or (isinstance(compare, str) and Path(compare).is_dir()):
        raise pytest.UsageError(
            f"--benchmark-compare takes the word after it, got {compare!r}, which is no run; put it last"
        )
    if compare and has_sides(config) and config.getoption("slow_down"):
        raise pytest.UsageError(
            "--slow-down is in no stored run, got --benchmark-compare and a side; leave one of them out"
        )
    if compare and names_candidate(config):
        raise pytest.UsageError(
            "--benchmark-compare compares this environment with a stored run, got --against; leave one out"
        )


def read_replicates(config: pytest.Config) -> int | None:
    """The process sets a side that --replicates asks for; None where it does not. Two sides need several."""
    text = config.getoption("replicates")
    if text is None:
        return None
    replicates = whole_number("--replicates", text, MOST_SETS)
    if replicates == 1 and has_sides(config) and not config.getoption("benchmark_compare"):
        raise pytest.UsageError(
            "--replicates 1 leaves nothing to judge a difference by, got two sides; pass 2 or more"
        )
    return replicates
