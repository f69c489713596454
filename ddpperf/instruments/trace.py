"""A profiler's trace of one rank: which of its time communicates, computes, copies, or does nothing of these."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.intervals import Interval, Split, split
from ddpperf.errors import CannotTrain

if TYPE_CHECKING:
    import torch

Event = dict[str, Any]

MARGIN_SECONDS = 1e-3  # at both ends of a profile: what a GPU's own clock puts outside of it would be dropped
MARK = "ddpperf steps"
# NCCL's kernels; torch's own, in memory that all GPUs have mapped; what gloo's threads do.
COMMUNICATION = re.compile(r"nccl.*kernel|(one|two)_shot_all_reduce|multimem_|gloo:", re.IGNORECASE)
ALL_REDUCE = re.compile("all_?reduce", re.IGNORECASE)
BARRIER = "gloo:barrier"
SPIN = "spin_kernel"  # a delay that was put in: neither computes nor communicates
COPIES = ("gpu_memcpy", "gpu_memset")


def trace_of(
    work: Callable[[], object],
    device: torch.device,
    *,
    meet: Callable[[], object] | None = None,
    path: Path | None = None,
) -> list[Event]:
    """The events of a profile of `work`, which is called once whatever becomes of it: other ranks may wait in it.

    A profile that cannot be had, for want of CUPTI or of the right to use it, has no events; why is told in the rank's output.
    meet: how the ranks meet when all are profiled, and before `work`, whose time is then an event of a CPU's trace.
    path: where the trace stays; None for nowhere. Raises CannotTrain if it cannot.
    """
    from torch.profiler import (
        ProfilerActivity,
        profile,
        record_function,
    )  # only here: the controller has no use for torch

    from ddpperf.instruments.timing import synchronize

    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    synchronize(device)
    profiler: profile | None = None
    failures: list[Exception] = []
    with _told(failures):
        profiler = profile(activities=activities)
        profiler.start()
    try:
        time.sleep(MARGIN_SECONDS)
        if meet is not None:
            meet()
        with record_function(MARK):
            work()
        synchronize(device)
        time.sleep(MARGIN_SECONDS)
    finally:
        if profiler is not None:
            with _told(failures):
                profiler.stop()
    if profiler is None or failures:
        return []
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(
            folder, "trace.json"
        )  # not there before: what cannot be written must not be read as an earlier one
        with _told(failures):
            profiler.export_chrome_trace(str(written))
            events = read_trace(written)
        if path is not None and not failures:
            _keep(written, path)
    return events


def _keep(written: Path, path: Path) -> None:
    """Whole, or not at all; raises CannotTrain, for this is what was asked for."""
    beside = path.with_suffix(".part")
    try:
        shutil.copyfile(written, beside)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise CannotTrain(
            f"the trace cannot be kept as {path} ({error.strerror}); name another folder by --traces"
        ) from error


@contextlib.contextmanager
def _told(failures: list[Exception]) -> Iterator[None]:
    """What goes wrong with a profile is told in the rank's own output, and ends no run."""
    try:
        yield
    except Exception as error:
        print(f"a step could not be profiled: {error!r}")
        failures.append(error)


def read_trace(path: Path) -> list[Event]:
    """The events of a trace in Chrome's format as torch.profiler writes it; raises ValueError for what is none."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no whole trace of torch.profiler ({error!r}); write it anew") from error
    if not (isinstance(events, list) and all(isinstance(event, dict) for event in events)):
        raise ValueError(f"{path} has no list of events as torch.profiler writes it; write it anew")
    return events


def split_of(events: Sequence[Event], *, met: bool = False) -> Split | None:
    """What a rank's profiled time was spent on, in seconds; None of a trace in which nothing runs.

    Of a GPU's trace that time is from the first to the last of the kernels; of a CPU's the marked one, and what computes are
    torch's operators. met: the first communication on a GPU is where the ranks met, and no part of it.
    Raises ValueError for events that do not say when they were.
    """
    began = _end_of_meeting(events) if met else 0.0
    on_gpu = [event for event in events if event.get("cat") == "kernel" and _interval(event)[0] >= began]
    copies = [
        each for event in events if event.get("cat") in COPIES and (each := _interval(event))[0] >= began
    ]
    if on_gpu:
        ran = [event for event in on_gpu if SPIN not in event["name"]]
        talks = [event for event in ran if COMMUNICATION.search(event["name"])]
        works = [event for event in ran if not COMMUNICATION.search(event["name"])]
        all_of_them = [*map(_interval, on_gpu), *copies]
        whole = min(begin for begin, _ in all_of_them), max(end for _, end in all_of_them)
    else:
        marks = [
            event for event in events if event.get("name") == MARK and event.get("cat") == "user_annotation"
        ]
        if not marks:
            return None
        whole = _interval(marks[0])
        talks = [event for event in events if _by_gloo(event)]
        works = [
            event
            for event in events
            if event.get("cat") == "cpu_op" and str(event["name"]).startswith("aten::")
        ]
    sums = [event for event in talks if ALL_REDUCE.search(str(event["name"]))]
    return split(whole, map(_interval, talks), map(_interval, works), copies, map(_interval, sums))


def communication_seconds(events: Sequence[Event]) -> list[float]:
    """What each communicating kernel of a GPU's trace took."""
    talks = [
        event for event in events if event.get("cat") == "kernel" and COMMUNICATION.search(event["name"])
    ]
    return [end - begin for begin, end in map(_interval, talks)]


def _end_of_meeting(events: Sequence[Event]) -> float:
    talks = [
        event for event in events if event.get("cat") == "kernel" and COMMUNICATION.search(event["name"])
    ]
    return min(map(_interval, talks), default=(0.0, 0.0))[1]


def _by_gloo(event: Event) -> bool:
    name = str(event.get("name"))
    return event.get("cat") == "user_annotation" and COMMUNICATION.match(name) is not None and name != BARRIER


def _interval(event: Event) -> Interval:
    """In seconds: a trace has microseconds."""
    try:
        begin, lasted = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the trace's event {str(event.get('name'))[:40]!r} does not say when it was ({error!r})"
        ) from error
    return begin / 1e6, (begin + lasted) / 1e6
