"""The suite's options: declared to pytest, checked once, and from then on one frozen value."""

from __future__ import annotations

import errno
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from pytest_benchmark.utils import PercentageRegressionCheck

MAX_WORLD_SIZE = 1024
MOST_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how, every default resolved for this machine."""

    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    rounds: int
    deadline_seconds: float
    worker_logs: Path | None
    slower_ratio: float | None


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddpperf", "performance of data-parallel training")
    group.addoption("--device", default="auto", metavar="NAME", help="cuda, cpu or auto (default: cuda where there are GPUs)")
    group.addoption(
        "--world-sizes", metavar="N,N", help="numbers of ranks (default: 1,2 on the CPU; 1,2,4,... and all on GPUs)"
    )
    group.addoption("--batch-sizes", metavar="N,N", help="images a rank in a step (default: 32 on the CPU; 32,128,512 on GPUs)")
    group.addoption("--rounds", default="10", metavar="N", help="timed rounds of each cell (default: %(default)s)")
    group.addoption(
        "--deadline",
        default="120",
        metavar="SECONDS",
        help="how long a rank may take over one command (default: %(default)s)",
    )
    group.addoption("--worker-logs", metavar="DIR", help="keep every rank's output in this folder, a file each")


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """The options as given; raises pytest.UsageError with one sentence for what cannot be done here."""
    if config.getoption("benchmark_storage") != "file://./.benchmarks":
        raise pytest.UsageError(
            "--benchmark-storage is not used: runs are kept in .ddpperf/runs and baselines in perf/baselines; leave it out"
        )
    if config.getoption("benchmark_histogram") and importlib.util.find_spec("pygal") is None:
        raise pytest.UsageError("--benchmark-histogram needs pygal, which is not installed; install it, or leave that out")
    compare = config.getoption("benchmark_compare")
    if compare == "" or (isinstance(compare, str) and Path(compare).is_dir()):
        raise pytest.UsageError(f"--benchmark-compare takes the word after it, got {compare!r}, which is no run; put it last")
    device = config.getoption("device")
    if device not in ("auto", "cpu", "cuda"):
        raise pytest.UsageError(f"--device must be auto, cpu or cuda, got {device!r}; pass one of them")
    if device == "auto":
        device = "cuda" if gpu_count else "cpu"
    world_sizes = _sizes(config, "--world-sizes") or default_world_sizes(device, gpu_count)
    check_world_sizes(world_sizes, device, gpu_count)
    logs = config.getoption("worker_logs")
    return Options(
        device=device,
        world_sizes=world_sizes,
        batch_sizes=_sizes(config, "--batch-sizes") or ((32,) if device == "cpu" else (32, 128, 512)),
        rounds=_whole_number("--rounds", config.getoption("rounds")),
        deadline_seconds=_seconds("--deadline", config.getoption("deadline")),
        worker_logs=_folder("--worker-logs", logs) if logs else None,
        slower_ratio=_slower_ratio(config),
    )


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


def _sizes(config: pytest.Config, option: str) -> tuple[int, ...]:
    text = config.getoption(option.removeprefix("--").replace("-", "_"))
    if text is None:
        return ()
    sizes = tuple(_whole_number(option, word) for word in text.split(","))
    if len(set(sizes)) != len(sizes):
        raise pytest.UsageError(f"{option} names a size twice, got {text!r}; name each once")
    return tuple(sorted(sizes))


def _whole_number(option: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and int(text) >= 1):
        raise pytest.UsageError(
            f"{option} takes whole numbers from 1 to {10**MOST_DIGITS - 1}, got {text[:40]!r}; pass for example {option} 2"
        )
    return int(text)


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise pytest.UsageError(f"{option} takes seconds above 0 and up to 86400, got {text!r}; pass for example {option} 60")
    return seconds


def _folder(option: str, text: str) -> Path:
    folder = Path(text).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise pytest.UsageError(
            f"{option} takes a folder that can be written, got {text!r} ({error.strerror}); name another"
        ) from error
    return folder


def _slower_ratio(config: pytest.Config) -> float | None:
    """The limit that `--benchmark-compare-fail=median:N%` sets on a step time's ratio to the baseline's.

    pytest-benchmark's own gate prints a traceback, knows no holes, and forgets all but the last of several.
    """
    checks = config.getoption("benchmark_compare_fail") or []
    given = sum(str(arg).startswith("--benchmark-compare-fail") for arg in config.invocation_params.args)
    if not checks:
        return None
    (check, *more) = checks
    if more or given > 1 or not isinstance(check, PercentageRegressionCheck) or check.field != "median":
        raise pytest.UsageError("--benchmark-compare-fail takes one median:N%, the only limit compared; got another or several")
    if not config.getoption("benchmark_compare"):
        raise pytest.UsageError("--benchmark-compare-fail needs a baseline to compare with; add --benchmark-compare")
    return 1 + float(check.threshold) / 100


def is_experiment(test: str) -> bool:
    """Whether a test id is an experiment's, by its file: one in a folder called perf."""
    return "perf" in Path(test.split("::")[0]).parts
