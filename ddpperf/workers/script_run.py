"""One whole run of a script: start it, wait until its ranks have measured their steps, and end it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.instruments.step_trace import MOST_BYTES
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.child_process import die_with_parent, wait_for_exit
from ddpperf.measuring.trace_split import PART, STEP, STEP_BYTES
from ddpperf.results.samples import CANDIDATE, Sample
from ddpperf.specs.script import ScriptSpec
from ddpperf.workers import script_guard, script_marks
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import Progress, SetOptions
from ddpperf.workers.rank_output import RankOutput

MEASURED_SECONDS = {"cpu": 5.0, "cuda": 5.0}  # of a run whose spec has no number of steps
# Of some steps of the candidate, as a fraction of a step: twice the tolerance, because there are only 24 such
# steps, and steps of 20 ms on 2 cores vary by 8%.
CONTROL_DELAY = {"cpu": 0.32, "cuda": 0.10}
CONTROL_RATIOS = tuple(f"{half}_delayed_over_usual" for half in ("early", "late"))
LATE_SECONDS = 10.0  # until all ranks have measured their last step, after the first one has
LOOK_SECONDS = 0.05
OUTPUT_LINES = 30  # of a script that failed
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
        if (size := max(path.stat().st_size for path in paths)) > MOST_BYTES:
            raise ValueError(f"a trace has {size >> 20} MiB, and at most {MOST_BYTES >> 20} are read")
        return [*map(str, paths)]

    def sample(self, count: int) -> Sample:
        """Return the first `count` measured steps as a sample with one round."""
        steps = [rank["seconds"][:count] for rank in self.ranks]
        slowest = sorted(map(max, zip(*steps, strict=True)))
        middle = median(slowest)
        pauses = [seconds for seconds in slowest if seconds > PAUSE * middle]
        each = {
            "first_step_seconds": [float(rank["first_step_seconds"]) for rank in self.ranks],
            "run_seconds": [self.run_seconds] * len(steps),
            "step_p50_seconds": [middle] * len(steps),
            "step_p99_seconds": [slowest[int(0.99 * (len(slowest) - 1))]] * len(steps),
            "step_largest_seconds": [slowest[-1]] * len(steps),
            "pause_steps": [float(len(pauses))] * len(steps),
            "pause_fraction": [sum(pauses) / sum(slowest)] * len(steps),
        }
        if all(rank["delayed_over_usual"] for rank in self.ranks):
            halves = zip(*(rank["delayed_over_usual"] for rank in self.ranks), strict=True)
            each |= dict(zip(CONTROL_RATIOS, map(list, halves), strict=True))
        if all(rank["on_gpu"] for rank in self.ranks):
            each["peak_memory_bytes"] = [float(rank["peak_memory_bytes"]) for rank in self.ranks]
        return Sample(
            set=self.name,
            side=self.side.name,
            torch=str(self.ranks[0]["environment"].get("torch", "")),
            seconds=(tuple(map(sum, steps)),),
            counters={name: tuple(values) for name, values in each.items()},
        )


def run_script(
    name: str,
    side: Side,
    spec: ScriptSpec,
    options: SetOptions,
    progress: Progress,
    trace: Path | None = None,
) -> ScriptRun:
    """Run a script until its ranks have measured their steps, and end all of its processes.

    trace: a folder for traces of some more steps, or None. Raises SetFailure if the script fails, hangs
    or takes too few steps, and OSError if it cannot be started.
    """
    with PrivateFolder() as private:
        folder = trace or private
        for command, module in BIN.items():
            path = private / "bin" / command
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(side.python)} {module} "$@"\n', "utf-8")
            path.chmod(0o700)
        seconds, began = MEASURED_SECONDS[options.device], time.monotonic()
        fields = {
            "folder": str(folder),
            "began": began,
            "first": spec.first_step,
            "steps": spec.steps,
            "seconds": seconds,
            "control": CONTROL_DELAY[options.device] if side.name == CANDIDATE else 0.0,
            "delay": spec.delay_seconds,
            "traced": trace is not None,
            "marks": [STEP, PART, STEP_BYTES],
        }
        reader, writer = os.pipe()
        with open(writer, "wb", buffering=0) as output:
            log = options.log_folder / f"{name}.log" if options.log_folder is not None else None
            printed = RankOutput(reader, log)
            try:
                guard = subprocess.Popen(
                    [sys.executable, script_guard.__file__, str(os.getpid()), spec.line],
                    cwd=side.root or Path.cwd(),
                    env=_variables(side, private / "bin", fields),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except BaseException:
                output.close()
                printed.close()
                raise
        run = _Run(name, spec, options, folder, guard, printed)
        try:
            problem = run.wait(progress, seconds)
        finally:
            run.end()
        if failure := run.failure(problem, side):
            raise SetFailure(name, f"in {spec.line!r}", [failure])
        ranks = sorted(run.ranks(), key=lambda rank: rank["rank"])
        return ScriptRun(
            name=name, side=side, folder=folder, ranks=ranks, run_seconds=time.monotonic() - began
        )


def _variables(side: Side, folder: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a script: the user's own, with ddpperf's marks and the side's code first."""
    own = os.environ | dict(side.environment)
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
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that hangs prints its stacks when it is ended
        script_marks.VARIABLE: json.dumps(fields),
    }


class _Run:
    """A script that runs: its guard, what it prints, and the files that its ranks write."""

    def __init__(
        self,
        name: str,
        spec: ScriptSpec,
        options: SetOptions,
        folder: Path,
        guard: subprocess.Popen[bytes],
        printed: RankOutput,
    ) -> None:
        self.name, self.spec, self.options, self.folder = name, spec, options, folder
        self.guard, self.printed = guard, printed
        self.status: int | None = None  # of the script, if it ended by itself

    def ranks(self) -> list[dict[str, Any]]:
        """Return what the ranks that have measured all their steps wrote."""
        return [json.loads(path.read_text("utf-8")) for path in sorted(self.folder.glob("rank-*.json"))]

    def wait(self, progress: Progress, seconds: float) -> str:
        """Wait until all ranks have measured their steps or the script has ended; return a problem or ""."""
        world_size, deadline = self.spec.world_size, self.options.deadline_seconds
        began, first_beat = time.time(), 0.0
        while (status := wait_for_exit(self.guard, LOOK_SECONDS)) is None:
            beats = [path.stat().st_mtime for path in self.folder.glob("beat-*")]
            records = [path.stat().st_mtime for path in self.folder.glob("rank-*.json")]
            now = time.time()
            if len(records) >= max(world_size, len(beats)):
                return ""
            if len(beats) > world_size and records:
                return ""
            if records and len(records) == len(beats) and now - max(records) > LATE_SECONDS:
                return ""  # another number of processes trains
            if now - max([began, *beats, *records]) > deadline:
                return f"took no step for {deadline:g} s; if it is only slow, pass a larger --deadline"
            if beats and progress is not None:
                first_beat = first_beat or now
                progress(min(0.99, (now - first_beat) / seconds))
        self.status = status
        return ""

    def end(self) -> None:
        """End all processes of the script."""
        hung = self.status is None and not [*self.folder.glob("rank-*.json")]
        if wait_for_exit(self.guard) is None:
            self.guard.send_signal(signal.SIGUSR1 if hung else signal.SIGTERM)
            most = script_guard.STACKS_SECONDS + 3 * script_guard.END_SECONDS
            if wait_for_exit(self.guard, most) is None:
                self.guard.kill()
        self.guard.wait()
        self.printed.close()

    def failure(self, problem: str, side: Side) -> RankFailure | None:
        """Return why the run is no measurement, or None."""
        spec, ranks = self.spec, self.ranks()
        last = "\n".join(self.printed.since(0).splitlines()[-OUTPUT_LINES:])
        detail = f"the end of its output:\n{last}" if last else "it printed nothing"
        if problem:
            return RankFailure(rank=0, cause=Cause.HUNG, what=problem, detail=detail)
        errors = [json.loads(path.read_text("utf-8")) for path in self.folder.glob("error-*.json")]
        of_ranks = [error for error in errors if error["rank"] >= 0] or errors
        few = len(ranks) < spec.world_size or min(len(rank["seconds"]) for rank in ranks) < (spec.steps or 1)
        if self.status is not None and few and of_ranks:
            first = min(of_ranks, key=lambda error: error["at"])
            what = f"raised {first['summary']}"
            return RankFailure(
                rank=max(0, first["rank"]), cause=Cause.RAISED, what=what, detail=first["traceback"]
            )
        if self.status and few:
            what = f"exited with status {self.status}"
            return RankFailure(rank=0, cause=Cause.DIED, what=what, detail=detail)
        what = self._too_few(ranks) or self._wrong_python(ranks, side)
        return RankFailure(rank=0, cause=Cause.RAISED, what=what, detail=detail) if what else None

    def _too_few(self, ranks: Sequence[Mapping[str, Any]]) -> str:
        spec, found = self.spec, len(ranks)
        if not ranks:
            advice = "call ddpperf.step() after each step, if no optimizer of torch makes it"
            return f"ended without a step of an optimizer of torch; {advice}"
        beats = max(found, len([*self.folder.glob("beat-*")]))
        if beats != spec.world_size:
            advice = f"write {{ranks}} for their number in the command, or pass --world-sizes {beats}"
            return f"trains with {beats} processes, not with {spec.world_size}; {advice}"
        measured = spec.steps or script_marks.LEAST_STEPS
        control = len(script_marks.CONTROL)
        least = spec.first_step + control + measured
        if (count := min(rank["count"] for rank in ranks)) < least:
            before = f"{spec.first_step} of warm-up, {control} of a control"
            need = f"{least} are needed ({before}, {measured} to measure)"
            return f"ended after {count} steps, and {need}; let it train longer, or name fewer steps"
        return ""

    def _wrong_python(self, ranks: Sequence[Mapping[str, Any]], side: Side) -> str:
        own = Path(side.python).parent.parent
        for rank in ranks:
            if side.python != sys.executable and Path(rank["prefix"]).resolve() != own.resolve():
                found = f"runs the Python in {rank['prefix']}, not the side's {side.python}"
                return f"{found}; begin the command with python or torchrun, without a folder"
            if rank["foreign"]:
                what = f"imports {rank['foreign'][0]} from the present checkout, not from {side.root}"
                return f"{what}; commit it, and do not install the project in editable mode"
        return ""
