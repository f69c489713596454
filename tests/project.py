"""A project of one's own to run the suite in, and the proof that a run left nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).parents[1]
HANG_SECONDS = 900  # what nothing here takes, however busy the machine: a guard against a hang
UNWANTED = (
    "PYTEST_",
    "GITHUB_",
    "CUDA_VISIBLE",
    "TORCHINDUCTOR_",
)  # variables of whoever runs the tests; torch sets the last

# A small experiment: one all_reduce of 1 KiB on two ranks.
ALL_REDUCE = """
from ddpperf.specs import AllReduceSpec, Fault

def test_all_reduce(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""

# A model whose step a CPU does quietly, of as many products as one likes: the spec, and the test's id, stay the same.
SUMS_MODEL = """
import torch
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, rows):
        for _ in range({sums}):
            rows = (rows @ self.weight).clamp(-1, 1)
        return rows

def sums():
    return Sums(), lambda size: (torch.ones(size, 64), torch.ones(size, 64)), nn.functional.mse_loss
"""

# A model whose forward pass takes the seconds given, to which what else the machine does adds next to nothing: it sleeps.
SLEEPING_MODEL = """
import time
import torch
from torch import nn

class Sleeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, rows):
        time.sleep({seconds})
        return rows @ self.weight

def sleeping():
    return Sleeping(), lambda size: (torch.ones(size, 64), torch.ones(size, 64)), nn.functional.mse_loss
"""


# In perf/thresholds.toml: limits of 10 to 15, which no noise of a busy machine reaches, of what is compared with a stored run.
NOISY = "[decision.cpu]\nrun_spread = 0.6\nnoisy_run_spread = 0.6\n"


class Marked:
    """Processes and files of one test, known by a temporary folder that all of them get as TMPDIR."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="t")
        )  # short: a Unix socket's path has at most 107 characters
        self.locks = Path(tempfile.mkdtemp(prefix="ddpperf-locks-"))
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(UNWANTED)
        } | {
            "TMPDIR": str(self.folder),
            "PYTHONPATH": str(REPOSITORY),
            "DDPPERF_LOCK_FOLDER": str(self.locks),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def processes(self) -> dict[int, str]:
        """The live processes of this test, their command lines by process id."""
        mark = f"\0TMPDIR={self.folder}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and mark in b"\0" + (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended meanwhile
        return found

    def ranks(self) -> list[int]:
        return [process for process, command in self.processes().items() if "bootstrap.py rank" in command]

    def assert_nothing_left(self, within_seconds: float = 2.0) -> None:
        """No process of this test lives, so none of its ports is open, and its temporary folder is empty."""
        wait_until(lambda: not self.processes(), within_seconds, lambda: f"left running: {self.processes()}")
        assert [path for path in self.folder.iterdir() if not path.name.startswith("pytest-of-")] == []

    def clean(self) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.locks, ignore_errors=True)


def script(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look up their own annotations
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses every file above 4 KiB, as a full disk would; pytest's own too, so for no longer than needed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until(condition: Callable[[], object], seconds: float, otherwise: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.02)


def wait_while_it_runs(
    process: subprocess.Popen[str], condition: Callable[[], object], otherwise: str
) -> None:
    """As long as the process, which is to bring it about, may still do so."""

    def met() -> object:
        assert process.poll() is None or condition(), f"{otherwise}: {process.communicate()[0]}"
        return condition()

    wait_until(met, HANG_SECONDS, lambda: otherwise)


def _handle_interrupts() -> None:
    """In a new process: let SIGINT interrupt it, even where this one was started to ignore SIGINT, as by nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project(Marked):
    """A folder with the suite's plugin and experiments of its own, run by a pytest of its own."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.experiment = root / "perf" / "test_it.py"
        self.experiment.parent.mkdir()
        self.experiment.write_text(ALL_REDUCE)
        (root / "conftest.py").write_text('pytest_plugins = ["ddpperf.plugin"]\n')
        (root / "pytest.ini").write_text("[pytest]\n")

    def start(self, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start pytest. output: the file descriptor that it prints to."""
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *self.options(), *arguments],
            cwd=self.root,
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_handle_interrupts,
        )

    def options(self) -> list[str]:
        """The options that every run has."""
        return ["-p", "no:cacheprovider", "--device", "cpu", "--world-sizes", "2", "--rounds", "3"]

    def run(self, *arguments: str, within_seconds: float = HANG_SECONDS) -> Finished:
        """Run pytest to its end; nothing may be left of it then."""
        process = self.start(*(arguments or ("perf",)))
        output, _ = process.communicate(timeout=within_seconds)
        finished = Finished(process.returncode, output)
        self.assert_nothing_left()
        return finished

    def saved_runs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.root.glob(".ddpperf/runs/*/*.json"))]

    def measured(self) -> dict[str, dict[str, Any]]:
        """What the newest run stored of each of its tests, by the test's name with its cell."""
        return {each["name"]: each["extra_info"]["ddpperf"] for each in self.saved_runs()[-1]["benchmarks"]}


class Finished:
    """A pytest run's exit status and what it printed."""

    def __init__(self, status: int, output: str) -> None:
        self.status = status
        self.output = output
        self.lines = [line.rstrip() for line in output.splitlines()]

    def __repr__(self) -> str:
        return f"exit status {self.status}\n{self.output}"

    def assert_one_sentence(self, status: int, *words: str) -> None:
        """The run ended with `status` and said `words` in one line, without a traceback."""
        assert self.status == status, self
        assert "Traceback" not in self.output, self
        assert "INTERNALERROR" not in self.output, self
        assert [line for line in self.lines if all(word in line for word in words)], self
