"""A project folder in which tests run pytest, and a check that nothing is left of a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpperf.io.private_folders import PREFIX, SHARED_MEMORY

REPOSITORY = Path(__file__).parents[1]
TEMPORARY = Path(tempfile.gettempdir())  # before a test sets another one
OF_RANKS = (f"sem.{PREFIX}", "torch_")  # begin the names of what ranks and their loaders put there
HANG_SECONDS = 900  # longer than anything here takes on a busy machine
# Variables of the process that runs the tests, which a project must not see. Torch sets the last.
UNWANTED = ("PYTEST_", "GITHUB_", "CUDA_VISIBLE", "TORCHINDUCTOR_")

# A small experiment: one all_reduce of 1 KiB on two ranks.
ALL_REDUCE = """
from ddpperf.specs import AllReduceSpec

def test_all_reduce(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""

# A model whose forward pass sleeps {seconds}: a busy machine hardly changes its time.
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


def unmapped(names: set[str]) -> set[str]:
    """Return the files of shared memory among these that no process has mapped.

    A file is known by its inode. The process that makes a semaphore has mapped it under another name.
    """
    inodes: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(OSError):  # it has been removed
            inodes[str((SHARED_MEMORY / name).stat().st_ino)] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if inodes else ():
        with contextlib.suppress(OSError):  # the process has ended
            for inode in re.findall(rf"(\d+) +{SHARED_MEMORY}/", maps.read_text(errors="replace")):
                inodes.pop(inode, None)
    return set(inodes.values())


class Marked:
    """The processes and files of one test, known by a temporary folder that all get as TMPDIR."""

    def __init__(self) -> None:
        self._shared_before = set(os.listdir(SHARED_MEMORY))
        self.folder = Path(tempfile.mkdtemp(prefix="t", dir=TEMPORARY))
        self.locks = Path(tempfile.mkdtemp(prefix="ddpperf-locks-", dir=TEMPORARY))
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(UNWANTED)
        } | {
            "TMPDIR": str(self.folder),
            "PYTHONPATH": str(REPOSITORY),
            "DDPPERF_LOCK_FOLDER": str(self.locks),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def processes(self) -> dict[int, str]:
        """Return the command lines of this test's live processes, by process id."""
        mark = f"\0TMPDIR={self.folder}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # the process has ended
                if entry.name.isdecimal() and mark in b"\0" + _environment(entry):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def ranks(self) -> list[int]:
        return [process for process, command in self.processes().items() if "rank_entry.py rank" in command]

    def shared_memory(self) -> set[str]:
        """Return what ranks have left in shared memory since this test began, for no live process."""
        found = {name for name in os.listdir(SHARED_MEMORY) if name.startswith(OF_RANKS)}
        return unmapped({name for name in found - self._shared_before if not self._has_folder(name)})

    def _has_folder(self, name: str) -> bool:
        """Return whether the private folder after which a semaphore is named is still there.

        It then belongs to another test, or `assert_nothing_left` finds the folder.
        """
        folder = name.removeprefix("sem.").partition("-")[0]
        roots = TEMPORARY, *TEMPORARY.glob("*")
        return name.startswith("sem.") and any((root / folder).exists() for root in roots)

    def assert_nothing_left(self, within_seconds: float = 2.0) -> None:
        """Check that no process of this test lives, and that it left no temporary files or semaphores."""

        def left() -> list[str]:
            files = [path.name for path in self.folder.iterdir() if not path.name.startswith("pytest-of-")]
            return [*self.processes().values(), *self.shared_memory(), *files]

        wait_until(lambda: not left(), within_seconds, lambda: f"left: {left()}")

    def clean(self) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.locks, ignore_errors=True)


def git(root: Path, *arguments: str) -> str:
    """Run git in a folder, as somebody without settings of their own; return what it printed."""
    settings = ("user.name=t", "user.email=t@t", "commit.gpgsign=false", "tag.gpgsign=false")
    command = ["git", "-C", str(root), *(word for each in settings for word in ("-c", each)), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    ).stdout.strip()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 4 KiB, as on a full disk; this holds for pytest's files too."""
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
    """Wait until the condition holds; fail at once if the process ends before."""

    def met() -> object:
        assert process.poll() is None or condition(), f"{otherwise}: {process.communicate()[0]}"
        return condition()

    wait_until(met, HANG_SECONDS, lambda: otherwise)


def _environment(process: Path) -> bytes:
    """Return a process's variables, b"" if it has ended.

    A thread that starts another program first ends all other threads, of which one is read for the process.
    """
    for file in (process / "environ", *process.glob("task/*/environ")):
        with contextlib.suppress(OSError):
            if found := file.read_bytes():
                return found
    return b""


def _handle_interrupts() -> None:
    """Let SIGINT interrupt this new process, even if its parent ignores SIGINT, as under nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project(Marked):
    """A folder with an experiment of its own, in which a test runs pytest with the plugin."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.experiment = root / "perf" / "test_it.py"
        self.experiment.parent.mkdir()
        self.experiment.write_text(ALL_REDUCE)
        (root / "conftest.py").write_text('pytest_plugins = ["ddpperf.plugin"]\n')
        (root / "pytest.ini").write_text("[pytest]\n")

    def start(self, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start pytest with these arguments. output: the file descriptor that it prints to."""
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
        plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
        return [*plugins, "--device", "cpu", "--world-sizes", "2", "--rounds", "3"]

    def run(self, *arguments: str) -> Finished:
        """Run pytest to its end and check that it left nothing behind."""
        process = self.start(*(arguments or ("perf",)))
        output, _ = process.communicate(timeout=HANG_SECONDS)
        finished = Finished(process.returncode, output)
        self.assert_nothing_left()
        return finished

    def saved_runs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.root.glob(".ddpperf/runs/*/*.json"))]

    def measured(self) -> dict[str, dict[str, Any]]:
        """Return what the newest run stored of each test, by the test's name with its case."""
        return {each["name"]: each["extra_info"]["ddpperf"] for each in self.saved_runs()[-1]["benchmarks"]}

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the newest run's rows, by the name of the first test or the control, and the metric."""
        rows = self.saved_runs()[-1]["ddpperf"]["judged"]["rows"]
        named = [(name, row) for row in rows for name in row["tests"] or [row["control"] or ""]]
        return {(name.rpartition("::")[2], row["metric"]): row for name, row in named}


class Finished:
    """The exit status of a pytest run, and what it printed."""

    def __init__(self, status: int, output: str) -> None:
        self.status = status
        self.output = output
        self.lines = [line.rstrip() for line in output.splitlines()]
        self.sentences = re.sub(r"\n +", " ", output).splitlines()  # with their continuation lines

    def __repr__(self) -> str:
        return f"exit status {self.status}\n{self.output}"

    def assert_one_sentence(self, status: int, *words: str) -> None:
        """Check the exit status, and that all `words` stand in one sentence, without a traceback."""
        assert self.status == status, self
        assert "Traceback" not in self.output, self
        assert "INTERNALERROR" not in self.output, self
        assert [line for line in self.sentences if all(word in line for word in words)], self
