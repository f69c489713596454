"""The Python interpreter, code and environment of ranks, and a check that ranks can start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ddpperf
from ddpperf.errors import Refused
from ddpperf.machine.child_process import run_child
from ddpperf.machine.git import repository_of
from ddpperf.machine.hardware import TUNING_VARIABLES
from ddpperf.workers.channel import PROTOCOL
from ddpperf.workers.rank_entry import PRESENT_CODE, SIDE_CODE

RANK_ENTRY = Path(__file__).with_name("rank_entry.py")
PROBE_SECONDS = 120
LOOPBACK = "lo"
MIN_PYTHON, MIN_TORCH = "3.11", "2.11"

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TEARDOWN_CUPTI": "1",  # what CUPTI leaves on after a profile makes a captured step 0.5% slower
}
# Variables of ranks on the CPU, unless the environment sets them.
ON_CPU = {
    # Memory in huge pages, where the kernel allows it. With small pages, processes of the same code
    # differ by 5% because their pages lie elsewhere. With huge pages they differ by 2%, and a step
    # of 8 images is 6% faster.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # How many collectives torch's flight recorder keeps, for the message about a hang. With torch's
    # default of 2000, a rank grows by 2.6 MB until the recorder is full. Ranks that use NCCL need the
    # default, because they start many collectives before the first one ends.
    "TORCH_FR_BUFFER_SIZE": "256",
}


def rank_environment(device: str) -> dict[str, str]:
    """Return the environment variables that the ranks of base and candidate on this machine share."""
    network = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    return (ON_CPU if device == "cpu" else {}) | os.environ | _ENVIRONMENT | network


def travelling_environment(device: str) -> dict[str, str]:
    """Return the variables of this process that ranks on any node need: those that change speed.

    Which GPUs are visible is each node's own matter.
    """
    tuning = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(TUNING_VARIABLES) and not name.startswith(("CUDA_VISIBLE", "NVIDIA_"))
    }
    return (ON_CPU if device == "cpu" else {}) | tuning | _ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Side:
    """The Python interpreter, code and environment of the base's or the candidate's ranks.

    name: "A" for the base (or without a comparison), "B" for the candidate. root: a folder that
    comes first on the ranks' path, followed by its folder src. If it holds a ddpperf, the ranks run
    that ddpperf.
    """

    name: str = "A"
    python: str = sys.executable
    root: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def package(self) -> Path:
        """The folder of the ddpperf that the ranks run."""
        own = self.root / "ddpperf" if self.root is not None else None
        return own if own is not None and (own / "__init__.py").is_file() else Path(ddpperf.__file__).parent

    @property
    def is_older(self) -> bool:
        """Whether this ddpperf is an older one, whose ranks do not understand all commands."""
        channel = self.package / "workers" / "channel.py"
        return not channel.is_file() or f'"{PROTOCOL}"' not in channel.read_text("utf-8")

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the base or the candidate adds for its ranks."""
        if self.root is None:
            return dict(self.environment)
        inherited = self.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        code = {SIDE_CODE: str(repository_of(self.root)), PRESENT_CODE: str(repository_of(Path.cwd()))}
        path = [str(self.root), str(self.root / "src"), os.getcwd(), *([inherited] if inherited else [])]
        # PYTHONSAFEPATH: otherwise the current folder would come before the root
        return {**self.environment, **code, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}

    def command(self, task: str, *arguments: str) -> list[str]:
        """Return the command line that runs rank_entry.py with the ranks' Python interpreter."""
        return [self.python, str(RANK_ENTRY), task, str(self.package), *arguments]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a side's ranks can import, as rank_entry.py reports it.

    folders: the folder on the path from which each module was imported. foreign: modules of the present
    repository, although the root comes first on the path. missing, why: the first module that cannot be
    imported, and the error.
    """

    python: str
    torch: str = ""
    cuda: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    foreign: Sequence[str] = ()
    torchvision: bool = True
    missing: str = ""
    why: str = ""

    def problem(self, root: Path | None, device: str, functions: Sequence[str] = ()) -> str:
        """Return why ranks cannot run or would not load the source tree `root`, or an empty string.

        functions: of the user, or paths of scripts, which no rank imports.
        """
        if release(self.python) < release(MIN_PYTHON):
            return f"is Python {self.python}, ddpperf needs {MIN_PYTHON} or newer; name a newer interpreter"
        if self.torch and release(self.torch) < release(MIN_TORCH):
            return f"has torch {self.torch}, ddpperf needs {MIN_TORCH} or newer; install one there"
        if self.missing:
            return f"cannot import {self.missing}, as its ranks must ({self.why}); install it there"
        if device == "cuda" and self.cuda is None:
            return f"has torch {self.torch} without CUDA; install one with CUDA, or pass --device cpu"
        if root is None:
            return ""
        loads = {str(root), str(root / "src")} & set(self.folders.values())
        if not loads and not any(function.startswith((".", "/")) for function in functions):
            places = ", ".join(f"{name} from {folder}" for name, folder in self.folders.items())
            advice = "name a checkout that has one of them, or merge the performance tests there first"
            return f"holds nothing that a rank loads, found {places}; {advice}"
        if self.foreign:
            found = f"its ranks would load {self.foreign[0]} of the current repository"
            return f"lacks a module: {found}; commit it there, in the root or in src/, but in no submodule"
        return ""


def check_side(side: Side, requested: str, device: str, functions: Sequence[str]) -> Found:
    """Check that ranks can start with the interpreter and the code of the base or the candidate.

    Raises Refused if they cannot, or if they would import nothing from their source tree, or modules of
    the current folder. requested: the options that name the side. functions: the models
    and other functions of the user that the ranks import, and the files of scripts.
    """
    try:
        ended = run_child(side.command("probe", *functions), side.variables(), PROBE_SECONDS)
    except OSError as error:
        why = f"cannot be started ({error.strerror}); name a Python interpreter"
        raise Refused(f"{requested} {why}") from error
    except subprocess.TimeoutExpired as error:
        why = f"did not import torch and the model within {PROBE_SECONDS} s; try these imports in it"
        raise Refused(f"{requested} {why}") from error
    try:
        found = Found(**json.loads(ended.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        errors = [f" ({line[:200]})" for line in ended.stderr.splitlines() if line.strip()]
        what = f"ended with status {ended.returncode}{''.join(errors[-1:])} before it had imported torch"
        advice = f"name a Python {MIN_PYTHON} or newer that can import torch and the model"
        raise Refused(f"{requested} {what} and the model; {advice}") from None
    if found.missing and "LD_PRELOAD" in side.environment:
        what = f"does not let its ranks import {found.missing} ({found.why})"
        raise Refused(f"{requested} {what}; name libraries that fit torch")
    if problem := found.problem(side.root, device, functions):
        raise Refused(f"{requested} {problem}")
    if side.is_older:
        what = "holds an older ddpperf, whose ranks cannot be compared with today's"
        raise Refused(f"{requested} {what}; store a new baseline with --benchmark-save=NAME")
    return found


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, or (0, 0) if the version has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
