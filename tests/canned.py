"""Canned measurements: the suite runs in this process, and no rank is started.

A `CannedSet` takes the place of a `ProcessSet` and answers its commands with the seconds and
counters of a `Canned`. Everything else is the product: the pool, its rounds, the plugin, the
verdict, what is saved and printed.

    def test_slower_code_fails(canned_suite: CannedSuite) -> None:
        canned_suite.run("perf")                                # as a user runs pytest, in 0.3 s
        canned_suite.canned.seconds = lambda spec, name: 0.02   # of a step, on process set `name`
        run = canned_suite.run("perf", "--benchmark-compare")
        assert run.status == 1
        assert "FAIL" in run.output
        assert canned_suite.measured()["test_all_reduce"]["samples"]
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from ddpperf import specs
from ddpperf.doctor.findings import Finding
from ddpperf.plugin import session
from ddpperf.specs import (
    AllReduceSpec,
    CollectiveSpec,
    CopySpec,
    EpochSpec,
    RunSpec,
    SamplerSpec,
    SingleCallsSpec,
    Spec,
    TrainingSpec,
)
from ddpperf.workers import pool
from ddpperf.workers.channel import PROTOCOL, Message
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Found
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.faults import PURPOSE
from tests.project import Finished, Project, git

INNER_OPTIONS = "--capture=sys --import-mode=importlib " + " ".join(
    f"-p no:{plugin}" for plugin in ("faulthandler", "unraisableexception", "threadexception", "xdist")
)
ENDING = ("finish", "close")  # commands that end a measurement
TORCH = "2.11.0"
ENVIRONMENT: Message = {
    "python": "3.12.0",
    "torch": TORCH,
    "cuda": None,
    "cudnn": None,
    "nccl": None,
    "nvls": None,
    "backend": "gloo",
    "threads": 1,
}
LATE = 0.9  # of the slowest collective calls, rank 1 is late
FAILURES = {  # of steps of tests/faults.py
    "kill": (Cause.DIED, "was killed by SIGKILL"),
    "leave": (Cause.DIED, "exited with status 0"),
    "raises": (Cause.RAISED, f"raised RuntimeError: {PURPOSE}"),
    "hang": (Cause.HUNG, "did not answer within {deadline:g} s"),
}


def pool_of(
    size: int,
    *,
    rounds: int = 3,
    device: str = "cpu",
    time_only: bool = False,
    cores: Sequence[Sequence[int]] | None = None,
    **others: Any,
) -> pool.Pool:
    """Return a pool of process sets of so many ranks. others: further arguments of Pool."""
    options = SetOptions(
        size=size, device=device, rounds=rounds, deadline_seconds=60, time_only=time_only, cores=cores
    )
    return pool.Pool(options, **others)


def step_seconds(spec: Spec, set_name: str) -> float:
    """Return the seconds of one step, or of one call, without delay; equal on all sets."""
    del set_name
    if isinstance(spec, AllReduceSpec | CollectiveSpec | CopySpec | SingleCallsSpec):
        return 20e-6 + spec.nbytes / 2e9
    if isinstance(spec, SamplerSpec):
        return 1e-3
    assert isinstance(spec, TrainingSpec)
    seconds = 2e-3 + 5e-3 * spec.per_rank_batch_size + 1e-3 * (spec.world_size - 1)
    return seconds * steps_of(spec)


def steps_of(spec: Spec) -> int:
    """How many training steps one timed step of this spec contains."""
    if isinstance(spec, RunSpec):
        return spec.steps_per_epoch * spec.epochs
    return spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1


def step_counters(spec: Spec, rank: int) -> dict[str, float]:
    del rank
    counters = {"communicator_seconds": 0.01} if spec.grouped else {}
    if isinstance(spec, SingleCallsSpec):
        slow = {f"call_{end}_seconds": 3 * step_seconds(spec, "") for end in ("p50", "p99", "largest")}
        late = {"late_rank": 1.0, "late_fraction": LATE, "late_seconds": slow["call_p50_seconds"]}
        modes = {"fast_mode_seconds": 4e-5, "slow_mode_seconds": 6e-5, "slow_mode_fraction": 0.1}
        counters |= {"event_seconds": 1e-7} | slow | late | modes
    if isinstance(spec, TrainingSpec):
        counters |= {"loss_after_5_steps": 2.0, "cpu_seconds": step_seconds(spec, "")}
        counters |= {"gradient_bytes": 46_758_048.0} if spec.grouped else {}
    return counters


def died(set_name: str) -> SetFailure:
    """Return the failure of a process set whose rank 0 died."""
    failure = RankFailure(rank=0, cause=Cause.DIED, what="exited with status 7", detail="")
    return SetFailure(set_name, "at sample", [failure])


def refused(set_name: str, what: str) -> SetFailure:
    """Return the failure of a process set whose rank 0 raised an error."""
    limit = what.startswith("RuntimeError")  # as in worker.py
    failure = RankFailure(rank=0, cause=Cause.RAISED, what=f"raised {what}", limit=limit)
    return SetFailure(set_name, "at open", [failure])


class Canned:
    """The answers of canned sets. A test sets `seconds`, `counters`, `kernels` or `spread`.

    seconds(spec, set name): of a step, without the spec's delay, which is added. counters(spec,
    rank). kernels(spec, set name): the digest of the kernels that a step runs. spread: by which
    fraction the rounds of a set differ from each other. set_counters(spec, set name): further counters
    of each rank of a set. refuses(spec, set name): what a rank raises at "open", or "".
    sampled: the names of the sets, in the order in which they were told to sample. asked: the ranks
    that each of these samples was asked of, and whether the sample has an untimed step. setup: what
    ranks answer to "setup".
    fails_at: the command at which a failing step of tests/faults.py fails.
    ended: the commands that end a measurement and the names of their sets, in order; "answer"
    stands for the answer to a command.
    """

    def __init__(self) -> None:
        self.seconds: Callable[[Spec, str], float] = step_seconds
        self.counters: Callable[[Spec, int], Mapping[str, float]] = step_counters
        self.kernels: Callable[[Spec, str], str] = lambda spec, name: ""
        self.spread = 0.002
        self.set_counters: Callable[[Spec, str], Mapping[str, float]] = lambda spec, name: {}
        self.refuses: Callable[[Spec, str], str] = lambda spec, name: ""
        self.sampled: list[str] = []
        self.asked: list[tuple[list[int], bool]] = []
        self.setup: Message = {"port": None, "environment": ENVIRONMENT, PROTOCOL: True}
        self.fails_at = "sample"
        self.ended: list[str] = []

    def round_seconds(self, spec: Spec, set_name: str, rank: int, round_number: int) -> float:
        noise = self.spread * ((3 * round_number + rank) % 5 - 2) / 4
        return self.seconds(spec, set_name) * (1 + noise) + spec.delay_seconds * steps_of(spec)


class CannedSet(ProcessSet):
    """A process set without processes."""

    canned: Canned
    spec: Spec
    rounds = 0
    asked: tuple[str, list[int], dict[str, Any]]

    def spawn(self) -> None:
        self.ask("setup")

    def ask(self, command: str, *, ranks: Any = None, **arguments: object) -> None:
        self.asked = command, list(range(self.options.size) if ranks is None else ranks), arguments
        if command in ENDING:
            self.canned.ended.append(f"{command} {self.name}")

    def answers(self, progress: Any = None, deadline_seconds: float | None = None) -> dict[int, Message]:
        command, ranks, arguments = self.asked
        if command in ENDING:
            self.canned.ended.append(f"answer {self.name}")
        if command == "open":
            self.spec = specs.from_json(arguments["spec"])
            if what := self.canned.refuses(self.spec, self.name):
                self.kill()
                raise refused(self.name, what)
        if command == self.canned.fails_at:
            self._fail(command, deadline_seconds or self.options.deadline_seconds)
        if command == "sample":
            self.rounds += 1
            self.canned.sampled.append(self.name)
            self.canned.asked.append((ranks, arguments["untimed"]))
        return {rank: self._answer(command, rank, arguments) for rank in ranks}

    def _answer(self, command: str, rank: int, arguments: dict[str, Any]) -> Message:
        match command:
            case "setup":
                return self.canned.setup
            case "open":
                return {"max_iterations": 1024}
            case "sample":
                seconds = self.canned.round_seconds(self.spec, self.name, rank, self.rounds)
                return {"seconds": arguments["iterations"] * seconds}
            case "finish":
                of_set = self.canned.set_counters(self.spec, self.name)
                return {"counters": {**self.canned.counters(self.spec, rank), **of_set}}
            case "close":
                return {"kernels": self.canned.kernels(self.spec, self.name) if arguments["kernels"] else ""}
            case _:
                return {}

    def _fail(self, command: str, deadline_seconds: float) -> None:
        """Fail as the ranks would, if the spec's step is one of tests/faults.py."""
        kind = getattr(self.spec, "function", "").removeprefix("tests.faults:")
        if kind in FAILURES:
            cause, what = FAILURES[kind]
            what = what.format(deadline=deadline_seconds)
            failure = RankFailure(rank=self.spec.world_size - 1, cause=cause, what=what)
            raise self._failure(command, [failure])


@contextlib.contextmanager
def canned_sets(canned: Canned) -> Iterator[None]:
    """Within, pools have canned sets instead of process sets."""
    kind = type("CannedSet", (CannedSet,), {"canned": canned})
    with mock.patch.object(pool, "ProcessSet", kind):
        yield


class CannedSuite(Project):
    """A project whose runs of pytest happen in this process, with canned measurements.

    Options that start child processes, such as --model and --candidate, take as long as ever.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.canned = Canned()
        # What the doctor finds when a run begins: a busy machine must not change what tests see
        self.run_findings: Callable[..., list[Finding]] = lambda gpus: []

    def run(self, *arguments: str) -> Finished:
        """Run pytest with these arguments, as `Project.run` does."""
        printed = io.StringIO()
        with (
            self._as_its_own_process(),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            status = pytest.main([*self.options(), *(arguments or ("perf",))])
        self.assert_nothing_left()
        return Finished(int(status), printed.getvalue())

    def commit(self, patch: pytest.MonkeyPatch) -> None:
        """Commit the project, so that comparisons can run this code without trying it first."""
        found = Found(python="", torch=TORCH, torchvision=True)
        patch.setattr("ddpperf.plugin.base_checkout.check_side", lambda *_: found)
        patch.setattr("ddpperf.plugin.base_checkout.version", lambda _: TORCH)
        (self.root / ".gitignore").write_text(".ddpperf/\n.pytest_cache/\n")
        git(self.root, "init", "--quiet")
        git(self.root, "add", ".")
        git(self.root, "commit", "--quiet", "-m", "one")

    @contextlib.contextmanager
    def _as_its_own_process(self) -> Iterator[None]:
        """Give pytest the folder, environment, path and modules of a process of its own."""
        before, modules = os.getcwd(), _of_pytest(sys.modules)
        with (
            mock.patch.dict(os.environ, self.environment | {"PYTEST_ADDOPTS": INNER_OPTIONS}, clear=True),
            mock.patch.object(tempfile, "tempdir", str(self.folder)),
            mock.patch.object(sys, "path", [str(self.root), *sys.path]),
            mock.patch.object(sys, "dont_write_bytecode", True),
            mock.patch.object(session, "run_findings", self.run_findings),
            canned_sets(self.canned),
        ):
            for name in modules:
                del sys.modules[name]
            os.chdir(self.root)
            try:
                yield
            finally:
                os.chdir(before)
                for name in [name for name, module in sys.modules.items() if _is_below(self.root, module)]:
                    del sys.modules[name]
                sys.modules.update(modules)


def _of_pytest(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """The modules of this pytest that another project has under the same names."""
    return {
        name: module
        for name, module in modules.items()
        if name == "conftest" or name.startswith("perf.test_")
    }


def _is_below(root: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(root)
