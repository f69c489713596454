"""Give each instant of a traced step to exactly one row, so that the rows of a step add up to its time.

A row is a path of names, such as ("operators", "forward", "aten::mul"). The input is a raw trace of
torch's profiler, whose steps instruments/step_trace.py has marked.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ddpperf.analysis.intervals import merged, overlap
from ddpperf.measuring.trace_split import (
    COMMUNICATION,
    COPIES,
    LAUNCHES,
    PART,
    STEP,
    STEP_BYTES,
    Event,
    by_id,
    of_categories,
)
from ddpperf.why.names import kernel

Path = tuple[str, ...]
COMPILED = re.compile(r"CompiledFxGraph|Torch-Compiled|CompiledFunction|TorchDynamo|AOTDispatcher")
NO_OPERATOR = ("autograd::", "torch::autograd::")  # what they do has names of its own
LOADER = "enumerate(DataLoader)"
BLOCKING = re.compile(
    r"Synchronize|cuda(Free|Malloc|HostAlloc|FreeHost|HostRegister|StreamDestroy)\b|cudaMemcpy\b"
)
BETWEEN = "CPU time between operators"
LAUNCHING = "CPU time between launches"
COPIED, SENT = "copies", "communication"
WAITS = "waits for messages"
LAUNCH_MICROSECONDS = 10.0  # from a launch to the begin of its kernel, at most, on a GPU that is idle
RANK_OF = {COPIED: 1, SENT: 2}  # of overlapping works, the lowest one has the time; kernels have 0


class Row(NamedTuple):
    """The seconds of a row in a step, and how many events it has."""

    seconds: float
    calls: int


class Span(NamedTuple):
    """An event of a thread, in microseconds. path: empty for what only encloses others."""

    begin: float
    end: float
    path: Path


Rows = dict[Path, Row]


def steps_of(events: Sequence[Event]) -> list[Rows]:
    """Return the rows of each traced step but the first; none if the trace has no marks of steps."""
    lasting = _lasting(events)
    copies = of_categories(lasting, "gpu_memcpy")
    marks = sorted(_span(copy) for copy in copies if copy.get("args", {}).get("bytes") == STEP_BYTES)
    if marks:
        return [_on_gpu(lasting, first.end, last.begin) for first, last in pairwise(marks[1:])]
    return [_on_cpu(lasting, step) for step in _steps_on_cpu(lasting)[1:]]


def total(rows: Rows) -> float:
    return sum(row.seconds for row in rows.values())


def waiting(rows: Rows) -> float:
    """Return the seconds of exposed communication, in which a rank may wait for others."""
    return sum(row.seconds for path, row in rows.items() if path[0] == SENT)


def _lasting(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def _steps_on_cpu(events: Sequence[Event]) -> list[Event]:
    """Return the events that mark steps, in their order."""
    marks = [event for event in of_categories(events, "user_annotation") if event["name"] == STEP]
    return sorted(marks, key=lambda event: float(event["ts"]))


def _parts_of(events: Sequence[Event]) -> list[Span]:
    """Return the parts of steps, such as forward, in their order. A part is the last name of its path."""
    notes = of_categories(events, "user_annotation")
    parts = [event for event in notes if event["name"].startswith(PART)]
    return sorted(_span(event, (BETWEEN, event["name"].removeprefix(PART))) for event in parts)


def _span(event: Event, path: Path = ()) -> Span:
    begin = float(event["ts"])
    return Span(begin, begin + float(event["dur"]), path)


def _added(rows: Rows, path: Path, microseconds: float, calls: int = 0) -> None:
    old = rows.get(path, Row(0.0, 0))
    rows[path] = Row(old.seconds + microseconds / 1e6, old.calls + calls)


# --- a step on a CPU


def _on_cpu(events: Sequence[Event], step: Event, *, functions: bool = False) -> Rows:
    """Return the rows of a step on a CPU: innermost operators, communication, and time between operators.

    functions: whether the time between operators is that of Python functions.
    """
    whole, thread = _span(step), step["tid"]
    inside = [event for event in events if whole.begin <= float(event["ts"]) < whole.end]
    own = [event for event in inside if event["tid"] == thread]
    parts = _parts_of(own)
    loading = [_span(event, ("loading", "DataLoader")) for event in own if event["name"].startswith(LOADER)]
    spans = loading + [
        _span(event, path)
        for event in own
        if not any(one.begin <= float(event["ts"]) < one.end for one in loading)
        if (path := _path_on_cpu(event, parts, functions))
    ]
    notes = [event for event in of_categories(inside, "user_annotation") if event["tid"] != thread]
    messages = [_span(event) for event in notes if COMMUNICATION.match(event["name"])]
    rows: Rows = {}
    for span in spans:
        _added(rows, span.path, 0.0, 1)
    running = merged((span.begin, span.end) for span in messages)
    for begin, end, path in _innermost([whole._replace(path=(BETWEEN, "")), *parts, *spans]):
        sent = overlap([(begin, end)], _near(running, begin, end)) if path[0] == BETWEEN else 0.0
        if sent:
            _added(rows, (SENT, WAITS), sent)
        _added(rows, path, end - begin - sent)
    if messages:
        _added(rows, (SENT, WAITS), 0.0, len(messages))
    return rows


def _path_on_cpu(event: Event, parts: Sequence[Span], functions: bool) -> Path:
    """Return the row of an event of the main thread; () for one that is no row."""
    name, kind = str(event["name"]), event.get("cat")
    place = bisect_right(parts, (float(event["ts"]), float("inf"))) - 1
    part = parts[place].path[1] if place >= 0 and float(event["ts"]) < parts[place].end else ""
    if kind == "python_function":
        # The time of a function of C is that of the Python function that calls it.
        return (BETWEEN, part, name) if functions and not name.startswith("<built-in") else ()
    if kind == "cpu_op" and COMPILED.search(name):
        return ("operators", part, "compiled graph")
    if kind != "cpu_op" or "::" not in name or name.startswith(NO_OPERATOR):
        return ()
    return (SENT, name) if name.startswith("c10d::") else ("operators", part, name)


def _near(running: Sequence[tuple[float, float]], begin: float, end: float) -> Iterator[tuple[float, float]]:
    """Return the messages that run between two instants, and some that do not."""
    for interval in running[max(0, bisect_right(running, (begin,)) - 1) :]:
        if interval[0] >= end:
            return
        yield interval


def _innermost(nested: Iterable[Span]) -> Iterator[Span]:
    """Split the time of nested spans into pieces, each with the path of the innermost span."""
    open_spans: list[Span] = []
    at = 0.0
    for span in [*sorted(nested, key=lambda span: (span.begin, -span.end)), Span(float("inf"), 0.0, ())]:
        while open_spans and (at < span.begin or open_spans[-1].end <= at):
            until = min(open_spans[-1].end, span.begin)
            if until > at:
                yield Span(at, until, open_spans[-1].path)
            at = max(at, until)
            if open_spans[-1].end <= at:
                open_spans.pop()
        at = span.begin
        if span.path:
            open_spans.append(span._replace(end=min(one.end for one in (span, *open_spans[-1:]))))


def functions_of(events: Sequence[Event]) -> dict[Path, float]:
    """Return the seconds of each part and Python function between operators, of the last traced step."""
    lasting = _lasting(events)
    if not (steps := _steps_on_cpu(lasting)):
        return {}
    rows = _on_cpu(lasting, steps[-1], functions=True)
    return {path[1:]: row.seconds for path, row in rows.items() if path[0] == BETWEEN and len(path) > 2}


# --- a step on a GPU


def _on_gpu(events: Sequence[Event], begin: float, end: float) -> Rows:
    """Return the rows of a step on a GPU: kernels, else copies, else communication, else idle time.

    The events of CPU time between launches are the operators and launches that begin in it.
    """
    works, rows = [], Rows()
    launched = of_categories(events, *LAUNCHES)
    for event in of_categories(events, "kernel", *COPIES):
        span = _span(event)
        inside = max(begin, span.begin), min(span.end, end)  # works of other streams may cross a mark
        if inside[0] < inside[1]:
            path = _path_on_gpu(event)
            works.append(
                (RANK_OF.get(path[0], 0), Span(*inside, path), event.get("args", {}).get("correlation"))
            )
            _added(rows, path, 0.0, int(span.begin >= begin))
    works.sort(key=lambda work: work[1].begin)
    for piece in _first_of(works):
        _added(rows, piece.path, piece.end - piece.begin)
    launches, parts = by_id("correlation", launched), _parts_of(events)
    blocked = sorted(_span(call, (call["name"],)) for call in launched if BLOCKING.search(call["name"]))
    on_cpu = sorted(float(event["ts"]) for event in of_categories(events, "cpu_op", *LAUNCHES))
    at, before = begin, None
    for _, span, correlation in [*works, (0, Span(end, end, ()), None)]:
        if span.begin > at:
            launch = launches.get(correlation)
            same = correlation is not None and correlation == before
            path = _idle(at, span.begin, same, launch, blocked, parts)
            began = bisect_right(on_cpu, span.begin) - bisect_right(on_cpu, at) if LAUNCHING in path else 0
            _added(rows, path, span.begin - at, began)
        if span.end >= at:
            at, before = span.end, correlation
    return rows


def _path_on_gpu(event: Event) -> Path:
    name = str(event["name"])
    if event["cat"] in COPIES:
        return COPIED, re.sub(r"\(.*", "", name).strip()
    if COMMUNICATION.search(name):
        grid, block = (event.get("args", {}).get(size, [0])[0] for size in ("grid", "block"))
        return SENT, (short := kernel(name)[1]), f"{short}, {grid} channels of {block} threads"
    return ("kernels", *kernel(name))


def _first_of(works: Sequence[tuple[int, Span, Any]]) -> Iterator[Span]:
    """Split the time of works that may overlap into pieces of the work that comes first in RANK_OF."""
    bounds = sorted({edge for _, span, _ in works for edge in span[:2]})
    running: list[tuple[int, Span]] = []
    place = 0
    for begin, end in pairwise(bounds):
        while place < len(works) and works[place][1].begin <= begin:
            running.append(works[place][:2])
            place += 1
        running = [work for work in running if work[1].end > begin]
        if running:
            yield Span(begin, end, min(running)[1].path)


def _idle(
    begin: float,
    end: float,
    same_launch: bool,
    launch: Event | None,
    blocked: Sequence[Span],
    parts: Sequence[Span],
) -> Path:
    """Return why a GPU has nothing to do between two instants."""
    if same_launch:
        return "idle", "inside a CUDA graph"
    for call in blocked[max(0, bisect_right(blocked, (begin,)) - 1) :]:
        if begin <= call.end <= end:
            return "idle", f"after {call.path[0]}, in which the CPU waits"
        if call.begin > end:
            break
    if launch is not None and "GraphLaunch" in str(launch["name"]):
        return "idle", "between CUDA graphs"
    if launch is not None and _span(launch).end + LAUNCH_MICROSECONDS < begin:
        return "idle", "between kernels that the CPU has launched before"
    at = float(launch["ts"]) if launch is not None else begin
    part = next((part.path[-1] for part in parts if part.begin <= at < part.end), "")
    return "idle", LAUNCHING, part
