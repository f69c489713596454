"""Faults of whole runs of pytest at random moments: of their controller, their disk and their devices."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.machine.device_lock import lock_devices
from tests.faults.left_behind import END_SECONDS, LeftBehind, files_in
from tests.faults.of_ranks import LOADER, LOADER_FRACTION, STEP, STUCK_SECONDS
from tests.faults.outcomes import NEVER, SKIPPED, Outcome
from tests.faults.steps import FILE_VARIABLE, RAISED, write_request
from tests.namespaces import CANNOT_MOUNT, can_mount, mounted
from tests.project import Project

INTERRUPTED_SECONDS = 5.0  # until an interrupted run has saved its results and ended
REFUSED_SECONDS = 15.0  # until a run is refused, from the start of its process: it imports torch
MOST_BYTES = 2**26  # that the output of a rank may take on the disk
FEWEST_STEPS = 12  # of a rank in the second test, warm-up included
MOST_PRINTED = 2**16  # bytes that a run may print
VERDICT = re.compile(r"^(PASS|FAIL|NO VERDICT)\b", re.MULTILINE)
UNSAFE = re.compile(r"\x1b|^(::|##\[)", re.MULTILINE)  # what a terminal or a CI service obeys
EXPERIMENT = """
from pathlib import Path
import pytest
from ddpperf.specs import AllReduceSpec, CustomStepSpec, EpochSpec

def cases(options):
    yield {spec}

def test_first(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
    Path("measured").touch()

@pytest.mark.specs(cases=cases)
def test_second(measure, spec):
    measure(spec)

def test_third(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of a fault.

    must_save: whether the results must be saved and judged. ranks_fail: whether ranks may fail, whose
    tracebacks are printed. is_next_right: whether the next measurement of the same run was right; None
    if that takes another run.
    """

    moment: str
    seconds: float | None = None
    limit_seconds: float = 0.0
    output: str = ""
    is_named: bool = True
    must_save: bool = True
    ranks_fail: bool = False
    is_next_right: bool | None = None
    wrong: Sequence[str] = field(default_factory=list)


class RunFaults:
    """A project in which pytest runs, until `close`."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._root = Path(tempfile.mkdtemp(prefix="faults-"))
        self._undo.callback(shutil.rmtree, self._root, ignore_errors=True)
        self._project = Project(self._root)
        self._undo.callback(self._project.clean)
        self._file = self._project.locks / "requested"
        self._project.environment[FILE_VARIABLE] = str(self._file)
        self._output = self._project.locks / "output"
        self._results = self._root / ".ddpperf"
        self._results.mkdir()
        self._left = LeftBehind(self._project, [self._results])
        self._write_experiment(loads=False)
        began = time.monotonic()
        process = self._start()
        self._wait_for_tests(process)
        self._start_seconds = time.monotonic() - began
        process.wait(STUCK_SECONDS)
        self._test_seconds = time.monotonic() - began - self._start_seconds
        assert process.returncode == 0, self._printed()

    def close(self) -> None:
        self._undo.close()

    def fault(self, name: str, number: int, chance: random.Random) -> Outcome:
        """Let a fault happen in a run, then run again, and return what came of it."""
        if name in MOUNTED and not can_mount():
            return Outcome(fault=name, number=number, moment=SKIPPED, report=CANNOT_MOUNT)
        self._clean()
        self._write_experiment(loads=name == NO_SHARED_MEMORY or chance.random() < LOADER_FRACTION)
        try:
            seen = RUN_FAULTS[name](self, chance)
        except subprocess.TimeoutExpired:
            seen = Seen(moment="?", seconds=NEVER, output=self._printed(), is_named=False)
        wrong = [*seen.wrong, *self._wrong(seen)]
        self._file.unlink(missing_ok=True)
        running = [f"process {command}"[:80] for command in self._left.running().values()]
        self._clean()
        left = () if name == KILLED else self._left.found()  # the next run removes what it finds
        is_next_right = self._is_next_right() if seen.is_next_right is None else seen.is_next_right
        self._clean()
        left += self._left.found()
        return Outcome(
            fault=name,
            number=number,
            moment=seen.moment,
            seconds=seen.seconds,
            limit_seconds=seen.limit_seconds,
            report=_verdict(seen.output),
            is_named=seen.is_named,
            is_next_right=is_next_right,
            left=tuple(dict.fromkeys((*running, *left))),
            wrong="; ".join(wrong),
        )

    # --- runs

    def _start(self, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
        with self._output.open("w") as output:
            return self._project.start("perf", *arguments, output=output.fileno(), within=within)

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")

    def _wait_for_tests(self, process: subprocess.Popen[str]) -> None:
        """Wait until pytest begins with the tests."""
        end = time.monotonic() + STUCK_SECONDS
        while process.poll() is None and "collected" not in self._printed() and time.monotonic() < end:
            time.sleep(0.02)

    def _wrong(self, seen: Seen) -> Iterator[str]:
        pattern = "INTERNALERROR" if seen.ranks_fail else "Traceback|INTERNALERROR"
        if found := re.search(pattern, seen.output):
            yield f"a {found[0]} was printed"
        if seen.must_save and (self._root / "measured").exists():
            if not VERDICT.search(seen.output):
                yield "there is no verdict, though something was measured"
            if not list(self._results.glob("runs/*/*.json")):
                yield "nothing was saved, though something was measured"

    def _is_next_right(self) -> bool:
        process = self._start("-k", "first")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(STUCK_SECONDS) == 0 and "PASS: 1 test measured" in self._printed()
        return False

    def _clean(self) -> None:
        """Remove what runs may leave."""
        (self._root / "measured").unlink(missing_ok=True)
        shutil.rmtree(self._root / "logs", ignore_errors=True)
        for saved in self._results.glob("runs/*/*.json"):
            saved.unlink()

    def _write_experiment(self, *, loads: bool) -> None:
        self._project.experiment.write_text(EXPERIMENT.format(spec=LOADER if loads else STEP))

    # --- faults of the controller

    def kill_controller(self, chance: random.Random) -> Seen:
        process = self._start()
        time.sleep(chance.uniform(0, self._start_seconds + self._test_seconds))
        is_testing = "collected" in self._printed()
        process.kill()
        process.wait()
        began = time.monotonic()
        self._left.running()
        return Seen(
            moment="tests" if is_testing else "start",
            seconds=time.monotonic() - began,
            limit_seconds=END_SECONDS,
            must_save=False,
        )

    def interrupt(self, chance: random.Random, times: int = 1) -> Seen:
        process = self._start()
        self._wait_for_tests(process)
        time.sleep(chance.uniform(0, self._test_seconds))
        began = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            if times > 1:
                time.sleep(chance.uniform(0, 0.5))
        status = process.wait(STUCK_SECONDS)
        output = self._printed()
        is_named = status == 125 and "interrupted by SIGINT" in output
        return Seen(
            moment="tests",
            seconds=time.monotonic() - began,
            limit_seconds=INTERRUPTED_SECONDS,
            output=output,
            is_named=is_named or (status == 0 and "PASS: 3 tests measured" in output),  # it came too late
        )

    # --- faults of the machine

    def flood(self, chance: random.Random) -> Seen:
        arguments = ["--worker-logs", "logs"] if (keeps := chance.random() < 0.5) else []
        word = chance.choice(("flood-lines", "flood-line"))
        self._write_experiment(loads=False)
        write_request(self._file, chance.choice((0, 1)), word, chance.randrange(FEWEST_STEPS))
        process, most = self._start(*arguments), 0
        end = time.monotonic() + STUCK_SECONDS
        while process.poll() is None and time.monotonic() < end:
            most = max(most, _size(self._project.folder) + _size(self._root / "logs"))
            time.sleep(0.05)
        process.wait(1)
        output, wrong = self._printed(), []
        if most > MOST_BYTES:
            wrong.append(f"the output took {most / 2**20:.0f} MiB on the disk")
        if len(output) > MOST_PRINTED:
            wrong.append(f"the run printed {len(output)} letters")
        if found := UNSAFE.search(output):
            wrong.append(f"the run printed {found[0]!r} of the output")
        return Seen(
            moment=f"{word}{' to logs' if keeps else ''}",
            output=output,
            is_named=RAISED in output and process.returncode == 1,
            ranks_fail=True,
            is_next_right=bool(re.search(r"^1 failed, 2 passed", output.split("= ")[-1])),
            wrong=wrong,
        )

    def fill_disk(self, chance: random.Random) -> Seen:
        moment = chance.choice(("results", "TMPDIR", "logs"))
        folder = {"results": self._results, "TMPDIR": self._project.folder, "logs": self._root / "logs"}[
            moment
        ]
        folder.mkdir(exist_ok=True)
        arguments = ["--worker-logs", "logs"] if moment == "logs" else []
        process = self._start(*arguments, within=mounted(folder, "2m"))
        return self._filled(process, folder, chance, moment, "No space left on device")

    def take_shared_memory(self, chance: random.Random) -> Seen:
        process = self._start(within=mounted(SHARED_MEMORY, "64k"))
        named = r"shared memory|/dev/shm|No space left on device|[Bb]us error"
        return self._filled(process, SHARED_MEMORY, chance, str(SHARED_MEMORY), named)

    def _filled(
        self, process: subprocess.Popen[str], folder: Path, chance: random.Random, moment: str, cause: str
    ) -> Seen:
        """Fill a folder of a run while it measures, and wait for its end."""
        self._wait_for_tests(process)
        time.sleep(chance.uniform(0, self._test_seconds / 2))
        _fill(Path(f"/proc/{process.pid}/root{folder}"))
        status, output = process.wait(STUCK_SECONDS), self._printed()
        return Seen(
            moment=moment,
            output=output,
            # A disk that was filled too late, when all was written, does no harm.
            is_named=re.search(cause, output) is not None or (status == 0 and "saved the run" in output),
            must_save=moment != "results",
            ranks_fail=True,
        )

    def take_port_or_lock(self, chance: random.Random) -> Seen:
        if chance.random() < 0.5:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = str(taken.getsockname()[1])
                key = str(self._project.locks / "node.key")
                options = "--nodes", "2", "--interface", "lo", "--node-port", port, "--node-key", key
                return self._refused("port", "cannot be used (Address already in use)", *options)
        variables = {"DDPPERF_LOCK_FOLDER": str(self._project.locks)}
        with mock.patch.dict(os.environ, variables), lock_devices(["cpu"]):
            return self._refused("lock", f"cpu is being measured by process {os.getpid()}")

    def _refused(self, what: str, cause: str, *arguments: str) -> Seen:
        began = time.monotonic()
        status, output = self._start(*arguments).wait(STUCK_SECONDS), self._printed()
        return Seen(
            moment=what,
            seconds=time.monotonic() - began,
            limit_seconds=REFUSED_SECONDS,
            output=output,
            is_named=status == 4 and cause in output,
        )

    def run_twice(self, chance: random.Random) -> Seen:
        """Start a second run while the first one goes on: one measures, and the other is refused."""
        processes = [self._project.start("perf")]
        time.sleep(chance.uniform(0, self._start_seconds + self._test_seconds))
        began = time.monotonic()
        processes.append(self._project.start("perf"))
        outputs = [process.communicate(timeout=STUCK_SECONDS)[0] for process in reversed(processes)][::-1]
        ends = [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
        passed = [output for status, output in ends if status == 0 and "PASS: 3 tests measured" in output]
        refused = [output for status, output in ends if status == 4 and "cpu is being measured by" in output]
        return Seen(
            moment="start",
            seconds=time.monotonic() - began if refused else None,
            limit_seconds=STUCK_SECONDS,
            output="\n".join((*passed, *refused)) or "\n".join(outputs),
            is_next_right=bool(passed),
            is_named=len(passed) >= 1 and len(passed) + len(refused) == 2,
        )


def _verdict(output: str) -> str:
    """Return the lines of a run's output from its verdict or its refusal on, or the last line."""
    found = VERDICT.search(output) or re.search("^ERROR: ", output, re.MULTILINE)
    return output[found.start() :][:500] if found else output.rstrip().rpartition("\n")[2][:500]


def _size(folder: Path) -> int:
    total = 0
    for path in files_in(folder):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _fill(folder: Path) -> None:
    """Write a file until the disk is full; do nothing if the run that sees the folder has ended."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(b"\0" * 1024):
            continue


KILLED, NO_SHARED_MEMORY, DISK_FULL = "controller killed", "no shared memory", "disk full"
MOUNTED = (NO_SHARED_MEMORY, DISK_FULL)  # faults that need a mount
RUN_FAULTS: dict[str, Callable[[RunFaults, random.Random], Seen]] = {
    KILLED: RunFaults.kill_controller,
    "Ctrl-C": RunFaults.interrupt,
    "Ctrl-C twice": functools.partial(RunFaults.interrupt, times=2),
    "output flood": RunFaults.flood,
    DISK_FULL: RunFaults.fill_disk,
    NO_SHARED_MEMORY: RunFaults.take_shared_memory,
    "port or lock taken": RunFaults.take_port_or_lock,
    "two runs at once": RunFaults.run_twice,
}
