"""The history of tests as lines of text: a sparkline, the changes, and what changed with them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import expm1, log
from statistics import median
from typing import Any

from ddpperf.history.changes import FEWEST_RUNS, Change, changes, spread
from ddpperf.history.past_runs import PastRun, Work
from ddpperf.machine.hardware import differences
from ddpperf.results import units
from ddpperf.verdict.noise_classes import usual_spread
from ddpperf.verdict.settings import Settings

SPARKS = "▁▂▃▄▅▆▇█"
MOST_SPARKS = 40
LEAST_RANGE = 0.02  # of a sparkline's heights, as a log ratio: smaller noise looks flat
OF_ALL = 0.8  # the fraction of the tests whose change at one run means that the machine changed
FEWEST_TESTS = 3  # which can show that the machine changed
Z95 = 1.96  # standard errors, half of a 95% interval


@dataclass(frozen=True, kw_only=True)
class Series:
    """The times of one test over the runs that measured the same work, oldest first."""

    work: Work
    runs: Sequence[PastRun]
    logs: Sequence[float]
    changes: Sequence[Change] = ()
    variant: str = ""  # how its spec differs from others of this test

    @property
    def test(self) -> str:
        return self.work[0]

    def runs_of(self, change: Change) -> tuple[PastRun, PastRun]:
        """Return the last run before a change, and the first run after it."""
        return self.runs[change.place - 1], self.runs[change.place]


def series_of(runs: Sequence[PastRun], settings: Settings, test: str = "") -> list[Series]:
    """Return the tests with enough runs, with their changes. test: only tests whose id has this text.

    A test has one series for each spec. The usual spread between runs is the median spread of the
    tests of a class, or that of the settings if few tests are in the class.
    """
    by_work: dict[Work, list[PastRun]] = {}
    for run in runs:
        for work in run.seconds:
            by_work.setdefault(work, []).append(run)
    enough = {work: of for work, of in by_work.items() if len(of) >= FEWEST_RUNS}
    logs = {work: [log(run.seconds[work]) for run in of] for work, of in enough.items()}
    classes: dict[float, list[float]] = {}
    for work, values in logs.items():
        classes.setdefault(usual_spread("time", work[1], settings), []).append(spread(values))
    found = []
    for work, of in enough.items():
        if test not in work[0]:
            continue
        usual = usual_spread("time", work[1], settings)
        if len(classes[usual]) >= FEWEST_TESTS:
            usual = median(classes[usual])
        others = [asdict(spec) for name, spec in enough if name == work[0] and spec != work[1]]
        own = asdict(work[1])
        variant = {name: own[name] for other in others for name in own if own[name] != other.get(name)}
        found.append(
            Series(
                work=work,
                runs=of,
                logs=logs[work],
                changes=changes(logs[work], usual, len(enough)),
                variant="".join(f" {name}={value}" for name, value in variant.items()),
            )
        )
    return found


def history_lines(
    runs: Sequence[PastRun], settings: Settings, test: str = "", damaged: Sequence[str] = ()
) -> list[str]:
    """Return a line for each test and each change, below a line for each change of the machine."""
    count = units.counted(len(runs), "run")
    lines = [f"{count} from {runs[0].day} to {runs[-1].day}"] if runs else []
    if damaged:
        lines.append(f"left out, because they are damaged or of another machine: {', '.join(damaged)}")
    found = series_of(runs, settings, test)
    if not found:
        measured = [work for run in runs for work in run.seconds if test in work[0]]
        most = max(map(measured.count, measured), default=0)
        what = f"tests with {test!r} in their names have" if test else "tests have"
        advice = f"a history needs {FEWEST_RUNS} that measured the same; run the suite each night"
        return [*lines, f"{what} at most {units.counted(most, 'comparable run')}, and {advice}"]
    every = series_of(runs, settings) if test else found
    moved = [runs[place].name for place in range(1, len(runs)) if _all_moved(every, runs[place])]
    for then, now in pairwise(runs):
        if facts := environment_changes(then.environment, now.environment):
            lines.append(f"{now.day}  {then.name} -> {now.name}: {'; '.join(facts)}")
        if now.name in moved:
            lines.append(f"{now.day}  {then.name} -> {now.name}: all tests moved, so the machine changed")
    for one in found:
        newest = units.seconds(one.runs[-1].seconds[one.work])
        lines += ["", f"{sparkline(one.logs)}  {newest}  {one.test}{one.variant}"]
        for change in one.changes:
            lines += _change_lines(one, change, moved)
    return lines


def _all_moved(found: Sequence[Series], run: PastRun) -> bool:
    """Return whether nearly all tests of a run changed with it, in one direction."""
    there = [one for one in found if run in one.runs[1:]]
    signs = [
        change.size > 0 for one in there for change in one.changes if one.runs[change.place].name == run.name
    ]
    most = max(signs.count(True), signs.count(False))
    return len(there) >= FEWEST_TESTS and most >= OF_ALL * len(there)


def environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what changed between two runs: versions, variables, the machine and its GPUs."""

    def flat(environment: Mapping[str, Any]) -> dict[str, Any]:
        gpu = (environment.get("gpus") or [{}])[0]
        own = {name: gpu.get(name) for name in ("driver", "power_limit_watts", "uuid")} if gpu else {}
        return {**environment, **own, "host": environment.get("hostname")}

    return differences(flat(then), flat(now)) if then and now else []


def sparkline(logs: Sequence[float]) -> str:
    shown = logs[-MOST_SPARKS:]
    low = min(shown)
    height = max(max(shown) - low, LEAST_RANGE)
    return "".join(SPARKS[int((value - low) / height * (len(SPARKS) - 1) + 0.5)] for value in shown)


def _change_lines(one: Series, change: Change, moved: Sequence[str]) -> list[str]:
    """Return a change with its size, interval and runs, and the command that finds its cause."""
    then, now = one.runs_of(change)
    ends = [expm1(change.size + sign * Z95 * change.error) for sign in (-1, 0, 1)]
    low, size, high = (f"{end:+.1%}" for end in ends)
    lines = [f"    {now.day}  {size} ({low} to {high})  {then.name} -> {now.name}"]
    good, bad = (then, now) if change.size > 0 else (now, then)
    torch = [str(run.environment.get("torch", "")) for run in (good, bad)]
    if now.name in moved:
        return [*lines, "        with all tests, so the machine changed"]
    if "+" in f"{good.commit}{bad.commit}":
        return [*lines, "        a commit had changes that were not committed, so its code is lost"]
    ends_of = (good.commit, bad.commit) if good.commit != bad.commit else [f"torch=={v}" for v in torch]
    if ends_of[0] == ends_of[1]:
        return [*lines, "        with the same commit and torch, so the machine changed"]
    if change.size < 0:
        return lines  # nobody searches what made it faster
    command = ["python", "-m", "ddpperf.bisect", "--good", ends_of[0], "--bad", ends_of[1], one.test]
    return [*lines, f"        {shlex.join(command)} {now.options}".rstrip()]
