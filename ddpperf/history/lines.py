"""The history of tests as lines of text: a sparkline, the changes, and what changed with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import expm1, log
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.errors import short
from ddpperf.history.changes import FEWEST_RUNS, Change, changes, spread
from ddpperf.history.past_runs import PastRun, Work, past_runs
from ddpperf.machine.hardware import differences
from ddpperf.results import units
from ddpperf.results.stored_runs import Storage
from ddpperf.verdict.noise_classes import usual_spread
from ddpperf.verdict.settings import Settings
from ddpperf.verdict.thresholds import read_threshold_file

SPARKS = "▁▂▃▄▅▆▇█"
MOST_SPARKS = 40
LEAST_RANGE = 0.02  # of a sparkline's heights, as a log ratio: smaller noise looks flat
OF_ALL = 0.8  # the fraction of the tests whose change at one run means that the machine changed
FEWEST_TESTS = 3  # which can show that the machine changed, or how much a class varies
Z95 = 1.96  # standard errors, half of a 95% interval


@dataclass(frozen=True, kw_only=True)
class Series:
    """The times of one test over the runs that measured the same work, oldest first."""

    work: Work
    runs: Sequence[PastRun]
    logs: Sequence[float]
    changes: Sequence[Change]


def history_lines(root: Path, hardware_key: str, test: str = "") -> list[str]:
    """Return a line for each change of a machine, and for each test and each of its changes.

    root: the project. test: only tests whose id has this text. Raises Refused for a wrong
    perf/thresholds.toml.
    """
    runs, damaged = past_runs(Storage(root=root, hardware_key=hardware_key))
    _, settings = read_threshold_file(root)
    every = series_of(runs, settings["cpu" if re.match(r"(\d+x)?cpu\d", hardware_key) else "gpu"])
    found = [one for one in every if test in one.work[0]]
    days = f" from {runs[0].day} to {runs[-1].day}" if runs else ""
    lines = [f"history of {hardware_key}: {units.counted(len(runs), 'run')}{days}"]
    if damaged:
        lines.append(f"left out, because they are damaged or of another machine: {', '.join(damaged)}")
    if not found:
        measured = [work for run in runs for work in run.seconds if test in work[0]]
        most = units.counted(max(map(measured.count, measured), default=0), "comparable run")
        needs = f"a history needs {FEWEST_RUNS} that measured the same; run the suite each night"
        return [*lines, f"tests{f' named {test!r}' if test else ''} have at most {most}, and {needs}"]
    moved = [run for run in runs if _all_moved(every, run)]
    for then, now in pairwise(runs):
        facts = environment_changes(then.environment, now.environment)
        facts += ["all tests moved, so the machine changed"] if now in moved else []
        lines += [f"{now.day}  {then.name} -> {now.name}: {short('; '.join(facts), 300)}"] if facts else []
    for one in found:
        newest = units.seconds(one.runs[-1].seconds[one.work])
        lines += ["", f"{sparkline(one.logs)}  {newest}  {one.work[0]}"]
        for change in one.changes:
            lines += _change_lines(one, change, moved)
    return lines


def series_of(runs: Sequence[PastRun], settings: Settings) -> list[Series]:
    """Return the tests with enough runs, with their changes. A test has one series for each spec.

    The usual spread between runs is the median of a class of tests; that of the settings if it is small.
    """
    by_work: dict[Work, list[PastRun]] = {}
    for run in runs:
        for work in run.seconds:
            by_work.setdefault(work, []).append(run)
    enough = {work: of for work, of in by_work.items() if len(of) >= FEWEST_RUNS}
    logs = {work: [log(run.seconds[work]) for run in of] for work, of in enough.items()}
    usual = {work: usual_spread("time", work[1], settings) for work in enough}
    classes: dict[float, list[float]] = {}
    for work, values in logs.items():
        classes.setdefault(usual[work], []).append(spread(values))
    found = []
    for work, of in enough.items():
        of_class = classes[usual[work]]
        typical = median(of_class) if len(of_class) >= FEWEST_TESTS else usual[work]
        changed = changes(logs[work], typical, len(enough))
        found.append(Series(work=work, runs=of, logs=logs[work], changes=changed))
    return found


def _all_moved(found: Sequence[Series], run: PastRun) -> bool:
    """Return whether nearly all tests of a run changed with it, in one direction."""
    there = [one for one in found if run in one.runs[1:]]
    slower = [c.size > 0 for one in there for c in one.changes if one.runs[c.place] is run]
    most = max(slower.count(True), slower.count(False))
    return len(there) >= FEWEST_TESTS and most >= OF_ALL * len(there)


def environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what changed between two runs: versions, variables, the host and the first GPU."""
    flat = []
    for environment in (then, now):
        gpu: Mapping[str, Any] = next(iter(environment.get("gpus") or ()), {})
        own = {name: gpu[name] for name in ("driver", "power_limit_watts", "uuid") if name in gpu}
        flat.append({**environment, **own, "host": environment.get("hostname")})
    return differences(*flat) if then and now else []


def sparkline(logs: Sequence[float]) -> str:
    shown = logs[-MOST_SPARKS:]
    height = max(max(shown) - min(shown), LEAST_RANGE)
    return "".join(SPARKS[round((value - min(shown)) / height * (len(SPARKS) - 1))] for value in shown)


def _change_lines(one: Series, change: Change, moved: Sequence[PastRun]) -> list[str]:
    """Return a change with its size, interval and runs, and the command that finds its cause."""
    then, now = one.runs[change.place - 1], one.runs[change.place]
    low, size, high = (f"{expm1(change.size + z * change.error):+.1%}" for z in (-Z95, 0, Z95))
    line = f"    {now.day}  {size} ({low} to {high})  {then.name} -> {now.name}"
    good, bad = then.commit, now.commit
    if good == bad:
        good, bad = (f"torch=={run.environment.get('torch')}" for run in (then, now))
    if now in moved or good == bad:
        why = "with all tests" if now in moved else "with the same commit and torch"
        return [line, f"        {why}, so the machine changed"]
    if "+" in f"{then.commit}{now.commit}":
        return [line, "        a commit had changes that were not committed, so its code is lost"]
    if change.size < 0:
        return [line]
    command = shlex.join(["python", "-m", "ddpperf.bisect", "--good", good, "--bad", bad, one.work[0]])
    return [line, f"        {command} {now.options}".rstrip()]
