"""Trace measurements that got slower on the live process sets of both sides: what changed in a step?"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from ddpperf.errors import first_line
from ddpperf.results import units
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import EpochSpec, ScriptSpec, Spec, TraceSpec
from ddpperf.why import sweep
from ddpperf.why.changes import Changes, TracedSet, changes
from ddpperf.why.tracing_sets import TracingSets
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import Answers

MOST_TRACED = 3  # measurements of a run
SECONDS = {"cpu": 60.0, "cuda": 30.0}  # for all of them
OPENING_SECONDS = {"cpu": 6.0, "cuda": 4.0}  # of them, per measurement: building, reading the traces
ROUNDS = 2  # of untraced, then traced steps
SETTLING_STEPS = 2  # before them, after freed memory is kept
FEWEST_STEPS, MOST_STEPS = 2, 8  # untraced or traced, in a round
STACKS_FROM = 0.3  # of a change: with so much CPU time between operators, Python functions are traced
SCRIPT_RUNS, SCRIPT_SECONDS, LEAST_SCRIPT_STEPS = 2, 3.0, 10  # of each side, before the traced steps
KEPT_RUNS = 5  # whose traces are kept
TOO_OLD = "has no attribute 'trace'"


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A measurement that got slower: its tests, and what base and candidate measured.

    seconds: the mean of both sides, of a step or of all the calls of one; of an epoch, of one of its
    training steps.
    """

    tests: Sequence[str]
    spec: Spec
    candidate: Spec | None
    seconds: float

    @classmethod
    def of(cls, tests: Sequence[str], spec: Spec, candidate: Spec, seconds: float) -> Slower:
        """Return a slower measurement from the mean seconds of a step, a call or an epoch."""
        steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
        return cls(tests=tests, spec=spec, candidate=candidate, seconds=seconds * spec.calls / steps)

    @property
    def traceable(self) -> bool:
        """Whether ranks can trace its steps, or those of its epoch. A whole training is too long."""
        return isinstance(self.spec, EpochSpec | ScriptSpec) or (
            self.spec.repeats and not isinstance(self.spec, TraceSpec)
        )


def explain(
    pool: Pool, slower: Sequence[Slower], folder: Path, stage: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return why measurements got slower, as JSON, the largest slow-downs first.

    slower: in this order. folder: of the raw traces of one run, beside those of earlier runs. stage:
    called with what is done now. Each entry has the tests and either a problem in one sentence, or the
    fields of `Changes.to_json`, the traced rank, the messages that changed and the files of raw traces.
    """
    device, found = pool.options.device, list[dict[str, Any]]()
    end = time.monotonic() + SECONDS[device]
    chosen = sorted(filter(lambda one: one.traceable, slower), key=lambda one: one.spec.compiled)
    for number, one in enumerate(chosen[:MOST_TRACED]):
        left = end - time.monotonic()
        # One set a side if steps are long, or compiled: sets compile one by one, 20 s each.
        most_sets = int(one.spec.compiled or left < _least_seconds(one, device, len(pool.sides)))
        if left < _least_seconds(one, device, 2 if most_sets else len(pool.sides)):
            problem = f"there is no time to trace steps of {units.seconds(one.seconds)}"
            found.append({"tests": [*one.tests], "problem": problem})
            continue
        stage(f"why it is slower, {number + 1} of {min(MOST_TRACED, len(chosen))}")
        try:
            found.append({"tests": [*one.tests], **_traced(pool, one, folder, left, most_sets)})
        except SetFailure as failure:
            side = "candidate" if failure.set_name.startswith(CANDIDATE) else "base"
            old = TOO_OLD in str(failure)
            problem = f"the {side}'s code is too old: its ranks cannot trace" if old else first_line(failure)
            found.append({"tests": [*one.tests], "problem": problem})
            break  # the process set has ended
        except Exception as error:  # such as a full disk, or a trace of another form
            found.append({"tests": [*one.tests], "problem": first_line(error)})
    if not chosen and slower:
        problem = "a whole training is too long to trace; compare a test of its step, too"
        found.append({"tests": [*slower[0].tests], "problem": problem})
    with contextlib.suppress(OSError):
        folder.rmdir()  # it is empty if nothing was traced
    _keep_newest(folder.parent)
    return found


def _least_seconds(one: Slower, device: str, sets: int) -> float:
    return OPENING_SECONDS[device] + sets * _steps_in_all(FEWEST_STEPS) * one.seconds


def _steps_in_all(steps: int) -> int:
    """Return how many steps a process set runs, with `steps` in each round."""
    return steps + SETTLING_STEPS + ROUNDS * (2 * steps + 1)


def _traced_script(pool: Pool, one: Slower, spec: ScriptSpec, folder: Path) -> dict[str, Any]:
    """Run a slower script twice more on each side, trace some steps, and return what changed as JSON."""
    device, sides = pool.options.device, [side.name for side in pool.sides]
    steps = max(LEAST_SCRIPT_STEPS, int(SCRIPT_SECONDS / one.seconds))  # all ranks trace the same steps
    specs = [replace(of, steps=steps) for of in (spec, one.candidate or spec) if isinstance(of, ScriptSpec)]
    of_side = [[place for place, side in enumerate(sides) if side == name] for name in (BASE, CANDIDATE)]
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        chosen = sorted(place for places in of_side for place in places[:SCRIPT_RUNS])  # A B B A
        runs = pool.run_scripts(specs[0], specs[1], chosen, Path(scratch))
        if problem := next((rank["problem"] for run in runs for rank in run.ranks if rank["problem"]), ""):
            raise ValueError(problem)
        last = {run.side.name: run for run in runs}
        files = {rank: {"file": file} for rank, file in enumerate(last[CANDIDATE].files("trace"))}
        rank = _least_waiting(files, device)
        sets = [
            TracedSet(
                side=run.side.name,
                first=run.ranks[rank]["seconds"],
                page_faults=0.0,
                seconds=run.ranks[rank]["seconds"],
                steps=_steps(run.files("trace")[rank], device),
            )
            for run in runs
        ]
        found = _found(sets, rank, device, lambda side: last[side].files("stacks")[rank])
        traces = []
        for side, word in ((BASE, "base"), (CANDIDATE, "candidate")):
            traces.append(str(folder / f"{spec.script}-{spec.world_size}-{word}-rank{rank}.json"))
            Path(last[side].files("trace")[rank]).replace(traces[-1])
    return {**found, "messages": {}, "traces": traces}


def _found(sets: Sequence[TracedSet], rank: int, device: str, stacks: Callable[[str], str]) -> dict[str, Any]:
    """Return what changed between the traced sets as JSON. stacks: the trace with functions of a side."""
    why, function, lost = changes(sets, device), "", ""
    if _between(why) >= STACKS_FROM * abs(why.whole.change):
        try:
            files = stacks(BASE), stacks(CANDIDATE)
            function = _function(*files, part=_part(why), device=device)
        except ValueError as error:  # such as a trace that is too large
            lost = first_line(error)
    return {**why.to_json(), "rank": rank, "sets": len(sets) // 2, "function": function, "lost": lost}


def _traced(pool: Pool, one: Slower, folder: Path, seconds: float, most_sets: int) -> dict[str, Any]:
    """Time and trace steps of a measurement on its process sets, and return what changed as JSON.

    most_sets: of each side; 0 for all of them.
    """
    if isinstance(one.spec, ScriptSpec):
        return _traced_script(pool, one, one.spec, folder)
    device = "cpu" if one.spec.on_cpu else pool.options.device
    with TracingSets(pool, one.spec, one.candidate, folder, one.tests[0], most_sets) as tracing:
        most = seconds / MOST_TRACED - OPENING_SECONDS[device]
        fitting = [
            steps
            for steps in range(FEWEST_STEPS, MOST_STEPS + 1)
            if len(tracing.sets) * _steps_in_all(steps) * one.seconds <= most
        ]
        steps = max(fitting, default=FEWEST_STEPS)
        first = {live.name: tracing.do(live, "time", steps) for live in tracing.sets}
        timed: dict[str, list[Answers]] = {live.name: [] for live in tracing.sets}
        files: dict[str, list[Answers]] = {live.name: [] for live in tracing.sets}
        tracing.all_do("keep")
        for live in tracing.sets:
            tracing.do(live, "time", SETTLING_STEPS)
        for number in range(ROUNDS):
            for live in tracing.sets if number % 2 == 0 else tracing.sets[::-1]:
                timed[live.name].append(tracing.do(live, "time", steps))
                files[live.name].append(tracing.do(live, "trace", steps))
        rank = _least_waiting(files[tracing.sides[CANDIDATE].name][0], device)
        sets = [
            TracedSet(
                side=live.side.name,
                first=first[live.name][rank]["seconds"],
                page_faults=first[live.name][rank]["page_faults"],
                seconds=[each for answers in timed[live.name] for each in answers[rank]["seconds"]],
                steps=[
                    step for answers in files[live.name] for step in _steps(answers[rank]["file"], device)
                ],
            )
            for live in tracing.sets
        ]
        found = _found(
            sets, rank, device, lambda side: tracing.do(tracing.sides[side], "stacks", 1)[rank]["file"]
        )
        # At the end: after it, torch 2.11 runs a compiled step of a base with older code eagerly.
        sent = {side: tracing.do(live, "messages") for side, live in tracing.sides.items()}
        traces = tracing.keep(
            {side: files[live.name][-1][rank]["file"] for side, live in tracing.sides.items()}
        )
    messages = _changed_messages(*(sent[side][rank]["messages"] for side in (BASE, CANDIDATE)))
    return {**found, "messages": messages, "traces": traces}


def _events(file: str) -> list[dict[str, Any]]:
    try:
        events: list[dict[str, Any]] = json.loads(Path(file).read_bytes())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"a trace cannot be read ({first_line(error)})") from error
    return events


def _steps(file: str, device: str) -> list[sweep.Rows]:
    events = _events(file)
    saw_device = device == "cpu" or any(event.get("cat") == "gpu_memcpy" for event in events)
    if not (saw_device and (steps := sweep.steps_of(events))):
        raise ValueError("a trace has no marks of its steps; torch's profiler saw nothing (CUPTI in use?)")
    return steps


def _least_waiting(answers: Answers, device: str) -> int:
    """Return the rank whose traced steps wait least for others: it is the one that makes them wait."""
    if len(answers) == 1:
        return next(iter(answers))
    steps = {rank: _steps(answer["file"], device) for rank, answer in answers.items()}
    waits = {rank: mean(map(sweep.waiting, of_rank)) for rank, of_rank in steps.items()}
    return min(waits, key=lambda rank: waits[rank])


def _changed_messages(
    base: Mapping[str, Sequence[int]], candidate: Mapping[str, Sequence[int]]
) -> dict[str, list[Sequence[int]]]:
    """Return the number and the bytes of a step's messages on both sides, of each kind that differs."""
    kinds = {**base, **candidate}
    both = {kind: [base.get(kind, (0, 0)), candidate.get(kind, (0, 0))] for kind in kinds}
    return {kind: sides for kind, sides in both.items() if [*sides[0]] != [*sides[1]]}


def _between(why: Changes) -> float:
    """Return by how many seconds the CPU's time between operators or launches grew."""
    return math.fsum(row.change for path, row, _ in why.rows if _is_between(path))


def _is_between(path: sweep.Path) -> bool:
    return sweep.BETWEEN in path or sweep.LAUNCHING in path


def _part(why: Changes) -> str:
    """Return the part of the step whose time between operators or launches stands first."""
    return next((path[-1] for path, _, _ in why.rows if _is_between(path)), "")


def _function(base: str, candidate: str, *, part: str, device: str) -> str:
    """Return the Python function whose own time in a part of the step grew most, with its file and line.

    A thread of its own, whose functions are not traced, runs the backward pass on a GPU.
    """
    before, now = (sweep.functions_of(_events(file)) for file in (base, candidate))
    grown = {path: seconds - before.get(path, 0.0) for path, seconds in now.items() if path[0] == part}
    if not grown or (device == "cuda" and part == "backward"):
        return ""
    name = max(grown, key=lambda path: grown[path])[-1]
    found = re.fullmatch(r"(.+)\((\d+)\): (.+)", name)
    return f"{found[3]} ({found[1]}:{found[2]})" if found else name


def _keep_newest(folder: Path) -> None:
    """Delete the traces of all but the newest runs; their folders' names sort by time."""
    runs = sorted(path for path in folder.glob("*") if path.is_dir()) if folder.is_dir() else []
    for path in runs[:-KEPT_RUNS]:
        shutil.rmtree(path, ignore_errors=True)
