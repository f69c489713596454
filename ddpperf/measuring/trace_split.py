"""Profile work of one rank, and split its time into communication, computation, copies and idle time."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.intervals import Interval, split

if TYPE_CHECKING:
    import torch

Event = dict[str, Any]
Call = Callable[[], object]

MARGIN_SECONDS = 1e-3  # idle time at both ends, because the profiler drops kernels outside the profile
MARK = "ddpperf steps"
STEP, PART = "ddpperf step", "ddpperf part "  # the begin of a step, and of a part such as forward
MOST_TRACE_BYTES = 2**26  # of a raw trace that is read
STEP_BYTES = 12_347  # of the copy that marks a step in a GPU's trace: no other copy has this size
# NCCL's kernels, torch's and this project's in memory that all GPUs have mapped, and gloo's threads.
COMMUNICATION = re.compile(
    "nccl.*kernel|(one_shot|two_shot|low_latency)_all_reduce|multimem_|gloo:", re.IGNORECASE
)
ALL_REDUCE = re.compile("all_?reduce", re.IGNORECASE)
BARRIER = "gloo:barrier"
SPIN = "spin_kernel"  # an added delay: neither computation nor communication
COPIES = ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


def trace_of(
    work: Call,
    device: torch.device,
    *,
    meet: Call | None = None,
    operators: bool = False,
) -> list[Event]:
    """Run `work` under torch's profiler, and return the events of the profiler's trace.

    `work` is called exactly once, even if profiling fails, because other ranks may wait in it.
    There are no events if the profile cannot be made, for example without CUPTI. The rank then
    prints why.
    meet: a barrier of the ranks before `work`, so that a CPU's trace times `work` alone.
    operators: whether a GPU's trace has torch's operators on the CPU, too, which cost time.
    """
    # Imported here: the controller imports this module and does not need torch.
    from torch.profiler import ProfilerActivity, profile, record_function

    from ddpperf.measuring.clock import synchronize

    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] * is_gpu + [ProfilerActivity.CPU] * (operators or not is_gpu)
    synchronize(device)
    profiler: profile | None = None
    failures: list[Exception] = []
    with _printed(failures):
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
            with _printed(failures):
                profiler.stop()
    if profiler is None or failures:
        return []
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "trace.json")  # a new file, so that no earlier trace can be read
        with _printed(failures):
            profiler.export_chrome_trace(str(written))
            events = json.loads(written.read_bytes())["traceEvents"]
    return events


@functools.cache
def load_profiler(device: torch.device) -> None:
    """Trace a GPU once, because the first trace of a process takes 5 s (four H100s).

    Process sets warm up at the same time, but finish one by one. So the first trace belongs in the
    warm-up.
    """
    import torch

    trace_of(lambda: torch.zeros(1, device=device), device)


@contextlib.contextmanager
def _printed(failures: list[Exception]) -> Iterator[None]:
    """Print an exception of torch's profiler and append it to a list, instead of raising it."""
    try:
        yield
    except Exception as error:
        print(f"a step could not be profiled: {error!a}")
        failures.append(error)


def split_of(events: Sequence[Event], *, met: bool = False) -> dict[str, float]:
    """Return the communication, computation, copy and idle seconds of a rank's profiler trace.

    The names are those of `split`. Returns nothing for a trace without work. On a GPU the time runs
    from the first to the last kernel. On a CPU it is the marked range, and torch's operators count as
    computation.
    met: whether the first communication on the GPU is a barrier, which is left out.
    """
    meetings = _communication_kernels(events)[:met]
    began = max((interval(event)[1] for event in meetings), default=0.0)
    kernels = [event for event in of_categories(events, "kernel") if interval(event)[0] >= began]
    copies = [copy for copy in map(interval, of_categories(events, *COPIES)) if copy[0] >= began]
    if kernels:
        ran = [event for event in kernels if SPIN not in event["name"]]
        works = [event for event in ran if not COMMUNICATION.search(event["name"])]
        begins, ends = zip(*map(interval, kernels), *copies, strict=True)
        whole = min(begins), max(ends)
    else:
        notes = of_categories(events, "user_annotation")
        marks = [interval(event) for event in notes if event["name"] == MARK]
        if not marks:
            return {}
        whole = marks[0]
        works = [event for event in of_categories(events, "cpu_op") if event["name"].startswith("aten::")]
    return split(whole, map(interval, messages_of(events, met=met)), map(interval, works), copies)


def messages_of(events: Sequence[Event], *, met: bool = False) -> list[Event]:
    """Return the events of a rank's messages in their order, without the barrier if the ranks `met` first."""
    sent = _communication_kernels(events)[met:]
    notes = of_categories(events, "user_annotation")
    sent += [note for note in notes if COMMUNICATION.match(note["name"]) and note["name"] != BARRIER]
    return sorted(sent, key=interval)


def communication_seconds(events: Sequence[Event]) -> list[float]:
    """Return the duration in seconds of each communication kernel in a GPU's trace."""
    return [end - begin for begin, end in map(interval, _communication_kernels(events))]


def _communication_kernels(events: Sequence[Event]) -> list[Event]:
    kernels = of_categories(events, "kernel")
    return sorted((event for event in kernels if COMMUNICATION.search(event["name"])), key=interval)


def of_categories(events: Sequence[Event], *categories: str) -> list[Event]:
    return [event for event in events if event.get("cat") in categories]


def by_id(name: str, events: Sequence[Event]) -> dict[Any, Event]:
    """Return events by an id, such as "correlation", which a launch and its kernel share."""
    return {event["args"][name]: event for event in events if name in event.get("args", {})}


def interval(event: Event) -> Interval:
    """Return the begin and end of a trace event in seconds, converted from microseconds."""
    begin, lasted = float(event["ts"]), float(event["dur"])
    return begin / 1e6, (begin + lasted) / 1e6
