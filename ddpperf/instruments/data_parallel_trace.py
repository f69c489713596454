"""Split a traced step of torch's DataParallel into computation and the parts of communication.

One process launches the work of all GPUs. A kernel or a copy belongs to the part of the step in which
the CPU launched it, which distinguishes the copy of a gradient from other copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ddpperf.analysis.intervals import Interval, length, overlap, split
from ddpperf.measuring.trace_split import COPIES, LAUNCHES, Event, by_id, interval, of_categories
from ddpperf.specs import DATA_PARALLEL_PARTS

RANGE = "ddpperf:"  # how the ranges of the forward pass begin in a trace
# Each range of the forward pass and each autograd node of the backward pass, with the part it belongs to.
RANGES = {f"{RANGE}{name}": name for name in ("replicate", "scatter", "gather")}
RANGES |= {"GatherBackward": "scatter", "ScatterBackward": "gather", "BroadcastBackward": "reduce"}


def mark_parts(model: Any) -> None:
    """Mark replicate, scatter and gather of a DataParallel model as ranges in the profiler's trace."""
    for part in ("replicate", "scatter", "gather"):
        setattr(model, part, _ranged(getattr(model, part), f"{RANGE}{part}"))


def _ranged(function: Any, name: str) -> Any:
    # Imported here: the controller imports this module and does not need torch.
    from torch.profiler import record_function

    def ranged(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return ranged


def seconds_by_part(events: Sequence[Event]) -> dict[str, float]:
    """Return the counters of a DataParallel step's trace, or nothing if no GPU worked.

    The counters are those of a rank's trace, over all GPUs together: exposed_comm_seconds is the time
    in which some GPU communicates and no GPU computes. replicate_seconds, scatter_seconds,
    gather_seconds and reduce_seconds are the times in which a GPU does the work of that part.
    idle_in_comm_seconds: the time in which the CPU launches one of these parts and no GPU does anything.
    unassigned_operations: kernels and copies without a launch in the trace, which count as computation.
    """
    operations = of_categories(events, "kernel", *COPIES)
    if not operations:
        return {}
    intervals: dict[str, list[Interval]] = defaultdict(list)
    parts = _parts_of(operations, events)
    for operation, part in zip(operations, parts, strict=True):
        other = "copies" if operation["cat"] in COPIES else "compute"
        intervals[part or other].append(interval(operation))
    communication = list(chain.from_iterable(intervals[part] for part in DATA_PARALLEL_PARTS))
    busy = [*communication, *intervals["compute"], *intervals["copies"]]
    begin, end = min(start for start, _ in busy), max(stop for _, stop in busy)
    counters = split((begin, end), communication, intervals["compute"], intervals["copies"])
    launching = [(max(start, begin), min(stop, end)) for start, stop in map(interval, _ranges(events))]
    return {
        **counters,
        **{f"{part}_seconds": length(intervals[part]) for part in DATA_PARALLEL_PARTS},
        "idle_in_comm_seconds": length(launching) - overlap(launching, busy),
        "unassigned_operations": float(parts.count(None)),
    }


def _parts_of(operations: Sequence[Event], events: Sequence[Event]) -> list[str | None]:
    """Return the part in which each kernel or copy was launched, "" for none, None if it is unknown.

    The correlation id of a launch is that of its kernel. The trace of a kernel without a launch may
    still name the operator that ran on the CPU.
    """
    launches = by_id("correlation", of_categories(events, *LAUNCHES))
    operators = by_id("External id", of_categories(events, "cpu_op", "user_annotation"))
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in _ranges(events):
        ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], RANGES[event["name"]]))
    found: list[str | None] = []
    for operation in operations:
        ids = operation.get("args", {})
        launch = launches.get(ids.get("correlation")) or operators.get(ids.get("External id"))
        found.append(None if launch is None else _part_at(launch["ts"], ranges[launch["tid"]]))
    return found


def _part_at(moment: float, ranges: Sequence[tuple[float, float, str]]) -> str:
    """Return the part whose range contains a moment, or ""; the ranges of a thread do not overlap."""
    return next((part for begin, end, part in ranges if begin <= moment <= end), "")


def _ranges(events: Sequence[Event]) -> list[Event]:
    return [event for event in of_categories(events, "user_annotation", "cpu_op") if event["name"] in RANGES]
