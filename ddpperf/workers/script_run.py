"""Whole runs of scripts: start them, let them run in turn until all steps are measured, and end them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.child_process import descendants_of, send_signal, wait_for_exit
from ddpperf.measuring.trace_split import MOST_TRACE_BYTES, PART, STEP, STEP_BYTES
from ddpperf.results.samples import Sample
from ddpperf.specs.script import ScriptSpec
from ddpperf.workers import script_guard, script_marks
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import ON_CPU, Side
from ddpperf.workers.process_set import SetOptions
from ddpperf.workers.rank_output import RankOutput
from ddpperf.workers.script_marks import ENOUGH, LAST, NEVER, TURN, turn_of

MEASURED_SECONDS = {"cpu": 5.0, "cuda": 5.0}  # of a run whose spec has no number of steps
# Of some steps of the candidate, as a fraction of a step: twice the tolerance, because there are only 24 such
# steps, and steps of 20 ms on 2 cores vary by 8%.
CONTROL_DELAY = {"cpu": 0.32, "cuda": 0.10}
CONTROL_RATIOS = tuple(f"{half}_delayed_over_usual" for half in ("early", "late"))
TURN_SECONDS, TURN_STEPS = 0.5, 4  # for which one script runs at least, while the others are stopped
MEMORY_PART = 0.8  # of the free memory, for scripts that are alive at the same time
CORES = 4  # for each rank of the scripts that start at the same time
LATE_SECONDS = 20.0  # until another rank begins to train
LOOK_SECONDS, TURN_LOOK_SECONDS = 0.05, 0.005
OUTPUT_LINES, STACK_LINES = 30, 150  # of a script that failed, or hung
PAUSE = 5.0  # a step of so many medians is a pause
BIN = {  # commands whose Python is the side's own
    "python": "",
    "python3": "",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m accelerate.commands.accelerate_cli",
}


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What one run of a script measured. ranks: what each rank wrote, in their order.

    run_seconds: the wall time of the whole run. folder: of its traces.
    """

    name: str
    side: Side
    folder: Path
    ranks: Sequence[Mapping[str, Any]]
    run_seconds: float

    @property
    def steps(self) -> int:
        return min(len(rank["seconds"]) for rank in self.ranks)

    def files(self, kind: str) -> list[str]:
        """Return the files with the raw traces of all ranks: of kind "trace" or, with functions, "stacks"."""
        paths = [self.folder / f"{kind}-{rank['process']}.json" for rank in self.ranks]
        if (size := max(path.stat().st_size for path in paths)) > MOST_TRACE_BYTES:
            raise ValueError(f"a trace has {size >> 20} MiB, and at most {MOST_TRACE_BYTES >> 20} are read")
        return [*map(str, paths)]

    def sample(self, count: int) -> Sample:
        """Return the first `count` measured steps as a sample with one round."""
        steps = [rank["seconds"][:count] for rank in self.ranks]
        slowest = sorted(map(max, zip(*steps, strict=True)))
        middle = median(slowest)
        pauses = [seconds for seconds in slowest if seconds > PAUSE * middle]
        whole = {
            "run_seconds": self.run_seconds,
            "step_p50_seconds": middle,
            "step_p99_seconds": slowest[int(0.99 * (len(slowest) - 1))],
            "step_largest_seconds": slowest[-1],
            "pause_steps": float(len(pauses)),
            "pause_fraction": sum(pauses) / sum(slowest),
        }
        counters = {name: (value,) * len(steps) for name, value in whole.items()}
        counters["first_step_seconds"] = tuple(float(rank["first_step_seconds"]) for rank in self.ranks)
        halves = zip(*(rank["delayed_over_usual"] for rank in self.ranks), strict=True)
        counters |= zip(CONTROL_RATIOS, halves, strict=True)
        if all(rank["peak_memory_bytes"] for rank in self.ranks):
            last = count // script_marks.MEMORY_STEPS - 1
            counters["peak_memory_bytes"] = tuple(
                float(rank["peak_memory_bytes"][last]) for rank in self.ranks
            )
        return Sample(
            set=self.name,
            side=self.side.name,
            torch=str(self.ranks[0]["environment"].get("torch", "")),
            seconds=(tuple(map(sum, steps)),),
            counters=counters,
        )


Job = tuple[str, Side, ScriptSpec]  # the name of a process set, its side, and what it measures


def run_scripts(
    jobs: Sequence[Job], options: SetOptions, progress: Callable[[float], None], traces: Path | None = None
) -> list[ScriptRun]:
    """Run scripts until their ranks have measured their steps, and end all of their processes.

    All scripts are alive at the same time, if they fit into the memory, and all but one are stopped: what
    changes the speed of the machine then affects all of them. Otherwise, a script begins when the one
    before it has ended. traces: a folder in which each run makes a folder with traces of some more steps;
    such scripts do not take turns. Raises SetFailure if a script fails, hangs or takes too few steps, and
    OSError if it cannot be started.
    """
    runs: list[ScriptRun] = []
    if len(jobs) > 1:
        runs = _run(jobs, options, progress, traces)
    if runs:
        return runs
    for job in jobs:

        def progress_of(part: float, done: int = len(runs)) -> None:
            progress((done + part) / len(jobs))

        runs += _run([job], options, progress_of, traces)
    return runs


def _run(
    jobs: Sequence[Job], options: SetOptions, progress: Callable[[float], None], traces: Path | None
) -> list[ScriptRun]:
    """Run scripts that are alive at the same time; return nothing if that is not possible.

    Their memory may not suffice, or they need what only one of them can have, such as a port. Several
    scripts start at once if there are enough cores, and wait after their first step.
    """
    seconds, several = MEASURED_SECONDS[options.device], len(jobs) > 1
    in_turns = several and traces is None
    cores = len(options.all_cores or os.sched_getaffinity(0))
    at_once = max(1, cores // (CORES * jobs[0][2].world_size))
    scripts: list[_Script] = []
    with ExitStack() as stack:
        while left := jobs[len(scripts) :]:
            starting = []
            for job in left[: at_once if scripts else min(2, at_once)]:
                folder = traces / job[0] if traces is not None else stack.enter_context(PrivateFolder())
                starting.append(_Script(*job, options, folder, traced=traces is not None, alone=not several))
                stack.callback(starting[-1].end)
            scripts += starting
            for script in starting if several else ():
                script.pause()  # after its first step
            for script in starting:
                script.resume()
                script.wait_until_ready()
                if in_turns:
                    script.pause()
                while not (script.finished or in_turns):
                    script.run(TURN_SECONDS, until=seconds)
                if script.finished and script.failure and len(scripts) > 1:
                    return []
                if script.finished:
                    script.result()  # raises an error if it failed
            if in_turns and not scripts[-1].fits(len(jobs) - len(scripts)):
                return []
            progress(len(scripts) / len(jobs) * (0.5 if in_turns else 0.99))
        while unfinished := [one for one in scripts if not one.finished]:
            for one in unfinished:
                one.run(TURN_SECONDS, until=seconds)
                one.pause()
            scripts.reverse()
            progress(0.5 + 0.5 * min(0.99, unfinished[0].ran / seconds))
        if several and any(one.failure for one in scripts):
            return []  # such as a time limit that passed while it was stopped
        by_name = {one.name: one for one in scripts}
        return [by_name[name].result() for name, *_ in jobs]


def _variables(side: Side, device: str, folder: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a script: the user's own, with ddpperf's marks and the side's code first."""
    own = (ON_CPU if device == "cpu" else {}) | os.environ | dict(side.environment)
    here, path = Path.cwd(), [entry for entry in own.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if side.root is not None:
        variables = side.variables()
        own |= {name: value for name, value in variables.items() if name.startswith("DDPPERF_")}
        moved = (Path(entry).absolute() for entry in path)
        path = [
            str(side.root / entry.relative_to(here) if entry.is_relative_to(here) else entry)
            for entry in moved
        ]
        path = [str(side.root), str(side.root / "src"), *path]
    return own | {
        "PATH": os.pathsep.join([str(folder), str(Path(side.python).parent), own.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("script_path")), *path]),
        "PYTHONFAULTHANDLER": "1",  # a process that hangs prints its stacks when it is ended
        script_marks.VARIABLE: json.dumps(fields),
    }


class _Script:
    """A script that runs: its guard, what it prints, and the files that its ranks write to a folder.

    ran: for how many seconds it has run since all ranks were ready to be measured. finished: whether all
    ranks have measured their steps, or the script has ended. It is ended as soon as it has finished.
    """

    def __init__(
        self,
        name: str,
        side: Side,
        spec: ScriptSpec,
        options: SetOptions,
        folder: Path,
        *,
        traced: bool,
        alone: bool,
    ) -> None:
        self.name, self.side, self.spec, self.options, self.folder = name, side, spec, options, folder
        self.ran, self.finished = 0.0, False
        self._stopped: list[int] = []  # process ids
        self._stopped_at, self._stopped_seconds = 0.0, 0.0
        self._target = 1  # the step after which all ranks wait
        self._room = math.inf  # how many more such scripts the memory of its GPUs can hold
        self._alive = 0.0  # seconds in which it was not stopped
        self._beaten, self._newest = 0.0, 0.0  # the last sign of life: what `_alive` and the clock were then
        self._joined, self._ranks = 0.0, 0  # when `_alive` another rank began to train, and how many do
        self._status: int | None = None  # of the script, if it ended by itself
        self._problem, self._lasted = "", 0.0
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TURN).write_bytes(struct.pack("qq", NEVER if alone else 1, 0))
        self._turn = turn_of(folder)
        for command, module in BIN.items():
            path = folder / command
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(side.python)} {module} "$@"\n', "utf-8")
            path.chmod(0o700)
        fields = {
            "folder": str(folder),
            "began": self._began,
            "first": spec.first_step,
            "steps": spec.steps,
            "control": CONTROL_DELAY[options.device],
            "delay": spec.delay_seconds,
            "marks": [STEP, PART, STEP_BYTES] if traced else [],
        }
        log = options.log_folder / f"{name}.log" if options.log_folder is not None else None
        reader, writer = os.pipe()
        with open(writer, "wb", buffering=0) as output:
            self._printed = RankOutput(reader, log)
            try:
                self._guard = subprocess.Popen(
                    [sys.executable, script_guard.__file__, str(os.getpid()), spec.line],
                    cwd=side.root or Path.cwd(),
                    env=_variables(side, options.device, folder, fields),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=partial(os.sched_setaffinity, 0, options.all_cores or os.sched_getaffinity(0)),
                )
            except BaseException:
                output.close()
                self._printed.close()
                raise

    def wait_until_ready(self) -> None:
        """Wait until all ranks have measured the control, or the script has finished."""
        while not (self.finished or self._are_all(self._count("ready-*"))):
            self._look(LOOK_SECONDS)
        self.ran = 0.0

    def run(self, seconds: float, until: float) -> None:
        """Let the script run for some seconds. Its ranks measure until it has run for `until` seconds."""
        self.resume()
        self._look(seconds)
        self.ran += seconds
        if self.ran >= until:
            self._turn[ENOUGH] = 1

    def _look(self, seconds: float) -> None:
        """Look whether the script finishes within some seconds, or hangs."""
        self._status = wait_for_exit(self._guard, seconds)
        self._alive += seconds
        beats = [*self.folder.glob("beat-*")]
        newest = max(path.stat().st_mtime for path in (self.folder, *beats))
        if newest > self._newest:
            self._newest, self._beaten = newest, self._alive
        if len(beats) > self._ranks:
            self._joined, self._ranks = self._alive, len(beats)
        if self._alive - self._beaten > self.options.deadline_seconds:
            more = "if it is only slow, pass a larger --deadline"
            self._problem = f"took no step for {self.options.deadline_seconds:g} s; {more}"
        measured = self._are_all(self._count("rank-*"))
        self.finished = self._status is not None or self._problem != "" or measured
        if self.finished:
            self.end()

    def _count(self, kind: str) -> int:
        return len([*self.folder.glob(kind)])

    def _are_all(self, ranks: int) -> bool:
        """Return whether so many are all ranks; also if it is another number than expected."""
        late = ranks == self._ranks > 0 and self._alive - self._joined > LATE_SECONDS
        return ranks >= max(self.spec.world_size, self._ranks) or late

    # --- turns

    def pause(self) -> None:
        """Stop all processes of the script, as soon as its ranks wait after the same step."""
        began = self._alive
        if self._turn[LAST] == NEVER:
            self._turn[LAST], self._target = self._target + TURN_STEPS, 0
        while not (self.finished or self._all_wait()):
            self._look(TURN_LOOK_SECONDS)
        self.ran += self._alive - began
        if not self.finished:
            self._stopped = descendants_of(self._guard.pid)
            send_signal(self._stopped, signal.SIGSTOP)
            self._stopped_at = time.monotonic()

    def _all_wait(self) -> bool:
        """Return whether all ranks wait after the same step.

        A rank that waits may hold up one that was already in the next step. So the first one that waits
        goes on for one more step, and after this step all of them wait.
        """
        waiting = [json.loads(path.read_text("utf-8")) for path in self.folder.glob("turn-*")]
        farthest = max((one["count"] for one in waiting), default=0)
        if farthest > self._target:
            self._turn[LAST] = self._target = farthest + (self._ranks > 1)
        there = [one["room"] for one in waiting if one["still"] and one["count"] == self._target]
        self._room = min(there, default=math.inf)
        return self._are_all(len(there) + self._count("over-*"))

    def resume(self) -> None:
        if self._stopped:
            for path in self.folder.glob("turn-*"):
                path.unlink()
            self._turn[LAST] = NEVER
            self._stopped_seconds += time.monotonic() - self._stopped_at
            send_signal(self._stopped, signal.SIGCONT)
            self._stopped = []

    def fits(self, others: int) -> bool:
        """Return whether the memory of this machine has room for some other such scripts."""
        used = 0
        for process in self._stopped:
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(process).memory_info()
                used += memory.rss - memory.shared
        free: int = psutil.virtual_memory().available
        return others * used < MEMORY_PART * free and others <= MEMORY_PART * self._room

    # --- the end

    def end(self) -> None:
        """End all processes of the script. May be called again."""
        if self._guard.returncode is not None:
            return
        self.resume()
        self._status = wait_for_exit(self._guard)
        if self._status is None:
            self._guard.send_signal(signal.SIGUSR1 if self._problem else signal.SIGTERM)
            if wait_for_exit(self._guard, script_guard.STACKS_SECONDS + 3 * script_guard.END_SECONDS) is None:
                self._guard.kill()
        self._guard.wait()
        self._printed.close()
        self._lasted = time.monotonic() - self._began - self._stopped_seconds

    def result(self) -> ScriptRun:
        """Return what was measured by a script that has ended, or raise SetFailure."""
        if self.failure is not None:
            raise SetFailure(self.name, "in a run of the script", [self.failure])
        ranks = self._read("rank")
        of_all = set[int].intersection(*(set(rank["numbers"]) for rank in ranks))
        for rank in ranks:  # those that waited for their turn in other steps did not time the same ones
            timed = zip(rank["numbers"], rank["seconds"], strict=True)
            rank["seconds"] = [seconds for number, seconds in timed if number in of_all]
        return ScriptRun(
            name=self.name, side=self.side, folder=self.folder, ranks=ranks, run_seconds=self._lasted
        )

    def _read(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text("utf-8")) for path in self.folder.glob(f"{kind}-*.json")]
        return sorted(found, key=lambda one: int(one["rank"]))

    @cached_property
    def failure(self) -> RankFailure | None:
        """Why a run that has ended is no measurement, or None."""
        ranks = self._read("rank")
        # torchrun raises ChildFailedError for a rank that was killed; its output says why
        errors = [one for one in self._read("error") if not one["summary"].startswith("ChildFailedError")]
        lines = STACK_LINES if self._problem else OUTPUT_LINES
        last = "\n".join(self._printed.since(0).splitlines()[-lines:])
        detail = f"the end of its output:\n{last}" if last else "it printed nothing"
        if self._problem:
            return RankFailure(rank=None, cause=Cause.HUNG, what=self._problem, detail=detail)
        what = self._too_few(ranks)
        if what and errors:
            of_ranks = [error for error in errors if error["rank"] >= 0] or errors
            first = min(of_ranks, key=lambda error: float(error["at"]))
            what, rank = f"raised {first['summary']}", first["rank"] if first["rank"] >= 0 else None
            return RankFailure(rank=rank, cause=Cause.RAISED, what=what, detail=first["traceback"])
        if what and self._status:
            what = f"exited with status {self._status}"
            return RankFailure(rank=None, cause=Cause.DIED, what=what, detail=detail)
        what = what or self._wrong_code(ranks)
        return RankFailure(rank=None, cause=Cause.RAISED, what=what, detail=detail) if what else None

    def _too_few(self, ranks: Sequence[Mapping[str, Any]]) -> str:
        spec = self.spec
        if not ranks and not self._ranks:
            advice = "call ddpperf.step() after each step, if no optimizer of torch makes it"
            return f"ended without a step of an optimizer of torch; {advice}"
        trained = max(len(ranks), self._ranks)
        if trained == spec.world_size and len(ranks) < trained:
            return f"ended in {trained - len(ranks)} of {trained} ranks before all steps were measured"
        if trained != spec.world_size:
            advice = f"write {{ranks}} for their number in the command, or pass --world-sizes {trained}"
            processes = f"{trained} process{'es' * (trained != 1)}"
            return f"trained with {processes}, not with {spec.world_size}; {advice}"
        measured, control = spec.steps or script_marks.LEAST_STEPS, len(script_marks.CONTROL)
        least = spec.first_step + control + measured
        if (count := min(rank["count"] for rank in ranks)) < least:
            before = f"{spec.first_step} of warm-up, {control} of a control"
            need = f"{least} are needed ({before}, {measured} to measure)"
            advice = "let it train longer, such as more epochs, or yield a ScriptSpec with fewer steps"
            return f"ended after {count} steps, and {need}; {advice}"
        return ""

    def _wrong_code(self, ranks: Sequence[Mapping[str, Any]]) -> str:
        side, own = self.side, Path(self.side.python).parent.parent
        for rank in ranks:
            if side.python != sys.executable and Path(rank["prefix"]).resolve() != own.resolve():
                found = f"runs the Python in {rank['prefix']}, not the side's {side.python}"
                return f"{found}; begin the command with python or torchrun, without a folder"
            if rank["foreign"]:
                what = f"runs {rank['foreign'][0]} of your checkout, not of {side.root}"
                advice = "name it by a relative path, commit it, or install the project without -e"
                return f"{what}; {advice}"
            if rank["on_gpu"] and self.options.device == "cpu":
                return "trains on a GPU; leave --device cpu out"
        return ""
