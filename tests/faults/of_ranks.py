"""Faults of ranks at random moments, in a pool of two ranks whose controller is this process."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from unittest import mock

import psutil

from ddpperf.specs import FUNCTIONS_VARIABLE, CustomStepSpec, EpochSpec, Fault, FaultKind, Spec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.faults.left_behind import LeftBehind
from tests.faults.outcomes import NEVER, Outcome
from tests.faults.steps import BYTES, FILE_VARIABLE, RAISED, write_request
from tests.faults.watched import watched_commands
from tests.project import REPOSITORY, Marked

AT_ONCE, AFTER_DEADLINE = 0.5, 2.0  # seconds until a death is reported; until a hang is, after its deadline
DEADLINE_SECONDS, LONG_SECONDS = 3.0, 120.0  # of a measurement that hangs; of the others
LONGEST_PAUSE = 0.7 * DEADLINE_SECONDS  # of a rank that is slow but alive
OTHER_SPAN = 0.1  # the length of a moment that no measurement shows
STUCK_SECONDS = 180.0  # then a fault counts as not reported
LOADER_FRACTION = 0.2  # of the signals that hit an epoch with processes that load images
ROUNDS = 6
STEP = CustomStepSpec(function="tests.faults.steps:make", world_size=2, per_rank_batch_size=1)
LOADER = EpochSpec(
    world_size=2,
    strategy="ddp",
    per_rank_batch_size=4,
    model="resnet10_cifar",
    input="dataloader",
    loader_workers=1,
    epoch_images=16,
)
# The moments, and the command with which each begins.
MOMENTS = {"set-up": "setup", "warm-up": "open", "round": "sample", "closing": "close", "end": "exit"}
BUSY = ("warm-up", "round", "closing")


@dataclass(frozen=True, kw_only=True)
class RankFault:
    """A fault of one rank, and a pattern for the cause that must be reported.

    signal: what the rank gets, or 0. word: what else happens, in most cases in a step. kind: the same
    fault of `ddpperf.specs.Fault`, for the closing, where no step runs. is_hang: whether the fault is
    reported after the deadline.
    """

    name: str
    cause: str = ""
    moments: Sequence[str] = BUSY
    signal: int = 0
    word: str = ""
    kind: FaultKind | None = None
    is_hang: bool = False


KILLED = "was killed by SIGKILL"
EXITED = "exited with status 0 before it answered"
RAISED_BY_TEST = f"raised RuntimeError: ({RAISED}|injected)"
HUNG = f"did not answer within {DEADLINE_SECONDS:g} s"
RANK_FAULTS = (
    RankFault(name="rank killed while idle", moments=("idle",), signal=signal.SIGKILL, cause=KILLED),
    RankFault(name="rank killed in set-up", moments=("set-up",), signal=signal.SIGKILL, cause=KILLED),
    RankFault(name="rank killed in warm-up", moments=("warm-up",), signal=signal.SIGKILL, cause=KILLED),
    RankFault(name="rank killed in a round", moments=("round",), signal=signal.SIGKILL, cause=KILLED),
    RankFault(name="rank killed at closing", moments=("closing", "end"), signal=signal.SIGKILL, cause=KILLED),
    RankFault(
        name="rank raises",
        word="raise",
        kind="raise",
        cause=RAISED_BY_TEST,
    ),
    RankFault(name="rank hangs", word="hang", kind="hang", cause=HUNG, is_hang=True),
    RankFault(name="rank is slow but alive", word="slow"),
    RankFault(
        name="rank out of memory",
        word="no memory",
        cause="raised (RuntimeError: .*can't allocate memory|MemoryError)",
        moments=("warm-up", "round"),
    ),
    RankFault(name="segmentation fault", signal=signal.SIGSEGV, cause="was killed by SIGSEGV"),
    RankFault(name="rank exits with 0", word="exit", kind="exit", cause=EXITED),
    RankFault(
        name="rank stopped",
        signal=signal.SIGSTOP,
        cause=HUNG,
        moments=("idle", *BUSY),
        is_hang=True,
    ),
)


class Stuck(BaseException):
    """Raised in a controller that is still waiting after STUCK_SECONDS."""


class Due:
    """A fault that is due some time after a command, and happens in a thread.

    fault: what happens to which `rank`. command: after which command, or "" for none. delay: how
    many seconds after it. pause: for how many seconds a slow rank is stopped. happened: when it was.
    """

    def __init__(
        self, fault: RankFault, *, rank: int, command: str, delay: float, pause: float, file: Path
    ) -> None:
        self.fault, self.command, self.happened = fault, command, 0.0
        self._rank, self._delay, self._pause, self._file = rank, delay, pause, file
        self._thread, self._over = threading.Thread(), threading.Event()

    def happen_after(self, command: str, process_set: ProcessSet) -> None:
        """Let the fault happen, if this is the first command of the kind that it waits for."""
        if command == self.command:
            self.command = ""
            self._thread = threading.Thread(target=self.happen, args=[process_set])
            self._thread.start()

    def happen(self, process_set: ProcessSet) -> None:
        time.sleep(self._delay)
        self.happened = time.monotonic()
        rank = psutil.Process(process_set.pids[self._rank])
        if self.fault.signal:
            rank.send_signal(self.fault.signal)
        elif self.fault.word == "slow":
            rank.send_signal(signal.SIGSTOP)
            self._over.wait(self._pause)
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGCONT)
        elif self.fault.word == "no memory":
            most = rank.memory_info().vms - BYTES // 2
            rank.rlimit(psutil.RLIMIT_AS, (most, most))
        else:
            write_request(self._file, self._rank, self.fault.word)

    def wait(self) -> None:
        """Wait until the fault has happened, and end a pause."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


class RankFaults:
    """A pool of two ranks to which faults happen, until `close`."""

    def __init__(self) -> None:
        self._mark = Marked()
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._mark.clean)
        self._file = self._mark.locks / "requested"
        self._left = LeftBehind(self._mark)
        self._sent: list[tuple[str, float]] = []  # commands to the ranks, and when they were sent
        self._due: Due | None = None
        options = SetOptions(
            size=2,
            device="cpu",
            rounds=ROUNDS,
            deadline_seconds=LONG_SECONDS,
            hang_folder=self._mark.locks / "hangs",
        )
        self._pool = Pool(options)
        self._undo.callback(self._pool.close)
        self._spans: dict[Spec, dict[str, float]] = {}

    def close(self) -> None:
        self._undo.close()

    def fault(self, fault: RankFault, number: int, chance: random.Random) -> Outcome:
        """Let a fault happen at a random moment, and return what came of it."""
        variables = {
            "TMPDIR": str(self._mark.folder),
            "PYTHONPATH": str(REPOSITORY),
            FUNCTIONS_VARIABLE: STEP.function,
            FILE_VARIABLE: str(self._file),
        }
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(tempfile, "tempdir", str(self._mark.folder)),
            watched_commands(self._on_command),
        ):
            return self._fault(fault, number, chance)

    def _fault(self, fault: RankFault, number: int, chance: random.Random) -> Outcome:
        moment = chance.choice(fault.moments)
        may_load = fault.signal and moment in BUSY and not fault.is_hang
        spec: Spec = LOADER if may_load and chance.random() < LOADER_FRACTION else STEP
        if spec not in self._spans:
            self._spans[spec] = dict(self._spans_of(spec))
        due = Due(
            fault,
            rank=chance.choice((0, 1)),
            command=MOMENTS.get(moment, ""),
            delay=chance.uniform(0, self._spans[spec].get(moment, OTHER_SPAN)),
            pause=chance.uniform(0, LONGEST_PAUSE),
            file=self._file,
        )
        if moment == "closing" and fault.kind is not None:
            due.command = ""
            spec = replace(STEP, fault=Fault(kind=fault.kind, rank=chance.choice((0, 1)), command="close"))
        try:
            with limited(STUCK_SECONDS):
                seconds, report = self._seconds_and_report(due, moment, spec)
        except Stuck:
            seconds, report = NEVER, ""
        is_silent = fault.word == "slow" or moment == "end"  # nothing is to be reported
        if is_silent:
            self._pool.close()
        self._file.unlink(missing_ok=True)
        return Outcome(
            fault=fault.name,
            number=number,
            moment=self._moment(due, moment, spec),
            seconds=None if fault.word == "slow" else max(0.0, seconds),
            limit_seconds=AFTER_DEADLINE if fault.is_hang else AT_ONCE,
            report=report[:1000],
            is_named=is_silent or re.search(fault.cause, report.partition("\n")[0]) is not None,
            wrong=report[:1000] if is_silent else "",
            left=self._left.found(),
            is_next_right=self._is_next_right(),
        )

    def _seconds_and_report(self, due: Due, moment: str, spec: Spec) -> tuple[float, str]:
        """Let a fault happen; return after how many seconds it was reported, and the report."""
        fault, report = due.fault, ""
        if moment == "set-up":
            self._pool.close()
        else:
            (live,) = self._pool.live_sets()
            is_short = fault.is_hang or fault.word == "slow"
            live.options = replace(
                live.options, deadline_seconds=DEADLINE_SECONDS if is_short else LONG_SECONDS
            )
        self._sent.clear()
        self._due = due
        if moment == "idle":
            due.happen(live)
            report = self._measure(spec) if fault.is_hang else _wait_for_death(live)
        elif moment == "end":
            self._pool.close()
        else:
            report = self._measure(spec)
        reported = time.monotonic()
        due.wait()
        if not report and fault.word != "slow" and moment != "end":  # it came after the last command
            (live,) = self._pool.live_sets() if fault.is_hang or fault.word else [self._live]
            report = self._measure(STEP) if fault.is_hang or fault.word else _wait_for_death(live)
            reported = time.monotonic()
        asked = self._sent[-1][1] if self._sent else due.happened
        return reported - (asked + DEADLINE_SECONDS if fault.is_hang else due.happened or asked), report

    def _moment(self, due: Due, moment: str, spec: Spec) -> str:
        """Return when a fault happened, which may have been after the moment that was meant."""
        commands = [command for command, when in self._sent if when <= due.happened]
        late = commands and moment in MOMENTS and commands[-1] != MOMENTS[moment]
        return f"{moment}{', loader' if spec == LOADER else ''}{f', at {commands[-1]}' if late else ''}"

    def _measure(self, spec: Spec) -> str:
        """Measure, and return what was wrong, or ""."""
        try:
            (sample,) = self._pool.measure(spec).samples
        except SetFailure as failure:
            return str(failure)
        is_right = all(len(ranks) == 2 and min(ranks) > 0 for ranks in sample.seconds)
        return "" if is_right and sample.seconds else f"measured {sample.seconds}"

    def _is_next_right(self) -> bool:
        try:
            with limited(STUCK_SECONDS):
                return self._measure(STEP) == ""
        except Stuck:
            return False

    def _spans_of(self, spec: Spec) -> Iterator[tuple[str, float]]:
        """Measure twice, and yield for how many seconds each moment of the second time lasts."""
        for _ in range(2):  # the first time, ranks import what they need
            self._sent.clear()
            assert self._measure(spec) == ""
            ended = time.monotonic()
            began = dict(reversed(self._sent))  # the first command of each kind
            if "setup" in began:
                yield "set-up", began["join"] - began["setup"]
        yield "warm-up", began["sample"] - began["open"]
        yield "round", began["close"] - began["sample"]
        yield "closing", ended - began["close"]

    def _on_command(self, command: str, process_set: ProcessSet) -> None:
        self._live = process_set
        self._sent.append((command, time.monotonic()))
        if self._due is not None:
            self._due.happen_after(command, process_set)


def _wait_for_death(live: ProcessSet) -> str:
    """Wait until a process set reports the death of a rank, and return the report."""
    end = time.monotonic() + STUCK_SECONDS
    while time.monotonic() < end:
        try:
            live.require_alive()
        except SetFailure as failure:
            return str(failure)
        time.sleep(0.005)
    return ""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Stuck in the main thread after so many seconds."""

    def raise_stuck(number: int, frame: FrameType | None) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, raise_stuck)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
