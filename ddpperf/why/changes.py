"""Compare the traced steps of base and candidate: rows with intervals that add up to the change of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Any

from ddpperf.analysis.statistics import t_quantile
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.why.sweep import LAUNCHING, SENT, Path, Rows, total

Means = Sequence[tuple[str, dict[Path, tuple[float, float]]]]  # of each process set: its side, and its rows

ALPHA = 0.01  # of a row's two-sided interval
LEAST_PART = 0.05  # of the change, that a clear row has
LEAST_OF_STEP = {"cpu": 0.02, "cuda": 0.002}  # that a clear row changes by: less differs between equal sides
SPECIFIC = 0.7  # of a family's change: a kernel with so much of it is named
SET_SPREAD = {"cpu": 0.1, "cuda": 0.01}  # of a step: one process set a side does not tell how they differ
# Seconds that tracing adds to an event; more is noise. On 2 CPU cores 0.6 us; beside an H200 0.4 us a kernel
# of a CUDA graph, and 3 us an operator or a launch.
MOST_PER_EVENT = {"cpu": 0.8e-6, "cuda": 4e-6}
MANY_FAULTS = 500  # page faults of a step, by which the sides differ


@dataclass(frozen=True, kw_only=True)
class TracedSet:
    """What the steps of one process set took on one rank.

    first: the seconds of untraced steps before freed memory was kept. page_faults: of one of them.
    seconds: of untraced steps after that. steps: the rows of the traced steps.
    """

    side: str
    first: Sequence[float]
    page_faults: float
    seconds: Sequence[float]
    steps: Sequence[Rows]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A duration of both sides, in seconds of a step, and the half of its change's 99% interval."""

    base: float
    candidate: float
    half: float
    calls: tuple[float, float] = (0.0, 0.0)

    @property
    def change(self) -> float:
        return self.candidate - self.base

    @property
    def sure(self) -> bool:
        return abs(self.change) > self.half


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Why a step got slower: its change, and the rows that add up to it.

    Clear rows come first, then those with another number of events, then others that change as the
    whole does; of these, the largest first.

    whole: of untraced steps. rows: each with its path, and whether it is clear. traced: the seconds
    that tracing adds to an event.
    """

    whole: Difference
    rows: Sequence[tuple[Path, Difference, bool]]
    per_event: float = 0.0

    @property
    def unexplained(self) -> float:
        return self.whole.change - sum(row.change for _, row, _ in self.rows)

    def to_json(self) -> dict[str, Any]:
        def fields(one: Difference) -> dict[str, Any]:
            return {"base": one.base, "candidate": one.candidate, "half": one.half, "calls": one.calls}

        rows = [{"path": path, "clear": clear, **fields(row)} for path, row, clear in self.rows]
        return {"step": fields(self.whole), "rows": rows, "unexplained": self.unexplained}


def changes(sets: Sequence[TracedSet], device: str) -> Changes:
    """Return the rows of the change from the base's sets to the candidate's; each side has at least one.

    Tracing adds a constant time to each event, so each row's change is smaller by that time for each
    additional event. While a GPU waits for the CPU, these are the events of the CPU, if they are more
    than those of the GPU. The memory's row is what a step takes longer while freed memory is given back,
    if one side has more page faults.
    """
    means = [(one.side, _mean_rows(one.steps)) for one in sets]
    paths = {path for _, rows in means for path in rows}
    on_cpu = {path for path in paths if LAUNCHING in path}
    events, by_cpu = max((_events(means, paths - on_cpu), False), (_events(means, on_cpu), True))
    traced = mean(sum(seconds for seconds, _ in rows.values()) for _, rows in means)
    untraced = [(one.side, mean(_middle(one.seconds))) for one in sets]
    slower = traced - mean(seconds for _, seconds in untraced)
    per_event = min(MOST_PER_EVENT[device], max(0.0, slower) / max(events, 1.0))
    spread = SET_SPREAD[device] * mean(seconds for _, seconds in untraced)
    whole = _difference(untraced, spread=spread)
    found = {
        path: _difference(
            [
                (side, max(0.0, seconds - per_event * calls * ((LAUNCHING in path) == by_cpu)))
                for side, rows in means
                for seconds, calls in (rows.get(path, (0.0, 0.0)),)
            ],
            # Which events of the CPU a GPU waits for is chance, so their number is no fact.
            calls=[(side, rows.get(path, (0.0, 0.0))[1] * (LAUNCHING not in path)) for side, rows in means],
            spread=spread,
        )
        for path in _with_specific(means, paths)
    }
    calls = [(one.side, one.page_faults) for one in sets]
    faults = _difference(calls, spread=0.0)
    if faults.sure and abs(faults.change) > MANY_FAULTS:
        first = [(one.side, mean(_middle(one.first))) for one in sets]
        pages = [(side, before - now) for (side, before), (_, now) in zip(first, untraced, strict=True)]
        whole = _difference(first, spread=spread)
        found["memory pages",] = _difference(pages, calls=calls, spread=spread)
    least = max(LEAST_PART * abs(whole.change), LEAST_OF_STEP[device] * whole.base)
    rows = [
        (path, row, row.sure and row.change * whole.change > 0 and abs(row.change) >= least)
        for path, row in found.items()
    ]
    rows.sort(key=lambda row: -abs(row[1].change))
    rows.sort(key=lambda row: (not row[2], *(_order(row[1], whole) if not row[2] else (False, False))))
    return Changes(whole=whole, rows=rows, per_event=per_event)


def _order(row: Difference, whole: Difference) -> tuple[bool, bool]:
    """Return what sorts unclear rows: those with another number of events, which is exact, come first."""
    alike = row.change * whole.change > 0
    counted = abs(row.calls[1] - row.calls[0]) >= 1 and abs(row.change) >= LEAST_PART * abs(whole.change)
    return not (alike and counted), not alike


def _events(means: Means, paths: Iterable[Path]) -> float:
    """Return the mean number of events of some rows."""
    return mean(sum(rows.get(path, (0.0, 0.0))[1] for path in paths) for _, rows in means)


def _middle(values: Sequence[Any], key: Callable[[Any], float] = float) -> Sequence[Any]:
    """Return the middle half of some values by their size."""
    ordered, out = sorted(values, key=key), len(values) // 4
    return ordered[out : len(ordered) - out]


def _mean_rows(steps: Sequence[Rows]) -> dict[Path, tuple[float, float]]:
    """Return the mean seconds and events of each row, over the middle half of the steps by their time.

    Means add up, medians do not.
    """
    middle = _middle(steps, key=total)
    return {
        path: (
            sum(rows[path].seconds for rows in middle if path in rows) / len(middle),
            sum(rows[path].calls for rows in middle if path in rows) / len(middle),
        )
        for path in {path for rows in middle for path in rows}
    }


def _with_specific(means: Means, paths: Iterable[Path]) -> list[Path]:
    """Join the rows of a family of kernels or of a collective to one row, named after its largest change."""
    families: dict[Path, list[Path]] = {}
    kept = []
    for path in paths:
        if path[0] in ("kernels", SENT):
            families.setdefault(path[:2], []).append(path)
        else:
            kept.append(path)
    for family, members in families.items():
        of_member = {path: _change(means, [path]) for path in members}
        whole = sum(of_member.values())
        largest = max(members, key=lambda path: abs(of_member[path]))
        is_most = abs(of_member[largest]) >= SPECIFIC * abs(whole) and of_member[largest] * whole > 0
        joined = largest if is_most else family
        kept.append(joined)
        for _, rows in means:
            values = [rows.pop(path) for path in members if path in rows]
            rows[joined] = sum(seconds for seconds, _ in values), sum(calls for _, calls in values)
    return kept


def _change(means: Means, paths: Iterable[Path]) -> float:
    seconds = [(side, sum(rows.get(path, (0.0, 0.0))[0] for path in paths)) for side, rows in means]
    return _difference(seconds, spread=0.0).change


def _difference(
    values: Sequence[tuple[str, float]], *, spread: float, calls: Sequence[tuple[str, float]] = ()
) -> Difference:
    """Return the difference of two sides' means over process sets, with its t interval.

    spread: half of the interval of single process sets.
    """
    base, candidate = ([value for side, value in values if side == name] for name in (BASE, CANDIDATE))
    freedom = len(base) + len(candidate) - 2
    if freedom > 0 and min(len(base), len(candidate)) > 1:
        squares = variance(base) / len(base) + variance(candidate) / len(candidate)
        half = t_quantile(ALPHA / 2, freedom) * math.sqrt(squares)
    else:
        half = spread
    sides = [[value for side, value in calls if side == name] or [0.0] for name in (BASE, CANDIDATE)]
    return Difference(
        base=mean(base), candidate=mean(candidate), half=half, calls=(mean(sides[0]), mean(sides[1]))
    )
