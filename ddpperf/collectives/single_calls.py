"""Times of single collective calls: their tails, their modes, and the rank that the others wait for."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.analysis.statistics import two_modes
from ddpperf.collectives.calls import AllReduce, Collective, RepeatedCall
from ddpperf.measuring.clock import keep_busy, synchronize
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import AllReduceSpec, CollectiveSpec, SingleCallsSpec

MOST_CALLS = 128  # of a round: a GPU's queue holds these calls and the events between them
LAUNCH_SECONDS = 1e-4  # per call of a round: a GPU spins so long that the CPU launches all calls meanwhile
MARKS = 100  # events without calls, which show what an event costs
SLOWEST = 0.05  # the fraction of all calls in which a late rank is looked for


class SingleCalls(Measurement):
    """Measurement of collective calls with an event before and after each call.

    On a GPU the calls are launched while the GPU spins, so that the times between events are those of
    the GPU. The first call of a round does not count there, because it waits until all ranks end their
    spin. On a CPU the events are times of perf_counter.
    """

    def __init__(self, spec: SingleCallsSpec, *, rank: int, device: torch.device) -> None:
        shared: Any = {"world_size": spec.world_size, "nbytes": spec.nbytes, "dtype": spec.dtype}
        self.calls: RepeatedCall
        if spec.kind == "all_reduce":
            self.calls = AllReduce(AllReduceSpec(**shared), rank=rank, device=device)
        else:
            kind = CollectiveSpec(kind=spec.kind, **shared)
            self.calls = Collective(kind, rank=rank, device=device)
        self.device = device
        self.max_iterations = min(MOST_CALLS, self.calls.max_iterations)
        self.marks: list[Any] = []  # events, or seconds of perf_counter
        self.rounds: list[list[float]] = []  # the seconds of each call

    def mark(self) -> None:
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def between_marks(self) -> list[float]:
        """Return the seconds between the marks, and forget the marks."""
        synchronize(self.device)
        pairs, self.marks = list(pairwise(self.marks)), []
        if self.device.type != "cuda":
            return [last - first for first, last in pairs]
        return [first.elapsed_time(last) / 1e3 for first, last in pairs]

    def step(self) -> None:
        self.mark()  # directly before the call: a rank that is late waits less in the call
        self.calls.call()
        self.mark()

    def start_round(self) -> None:
        self.calls.start_round()

    def begin_timed(self) -> None:
        self.marks = []
        if self.device.type == "cuda":
            keep_busy(MOST_CALLS * LAUNCH_SECONDS)

    def end_round(self, steps: int) -> None:
        seconds = self.between_marks()[::2]
        self.rounds.append(seconds[1:] if self.device.type == "cuda" and steps > 1 else seconds)
        self.calls.end_round(steps)

    def finish(self) -> dict[str, float]:
        """Return what `tails` finds in the times of all ranks, and `event_seconds`, what an event costs."""
        self.begin_timed()
        for _ in range(MARKS):
            self.mark()
        event_seconds = median(self.between_marks()[1:])
        longest = max(map(len, self.rounds))  # shorter rounds were trials
        counted = [seconds for of_round in self.rounds if len(of_round) == longest for seconds in of_round]
        own = torch.tensor(counted, dtype=torch.float64, device=self.device)
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, own)
        return {"event_seconds": event_seconds, **tails(torch.stack(of_ranks).cpu())}


def tails(seconds: Tensor) -> dict[str, float]:
    """Return counters of single calls from their seconds [rank, call].

    A call's time is that of the rank that waits longest. The rank that comes last has the shortest
    time. In the slowest 5% of all calls, `late_rank` is the rank that comes last most often,
    `late_fraction` the fraction of these calls, and `late_seconds` the median time that others wait.
    `fast_mode_seconds` and `slow_mode_seconds` are the medians of two modes, if there are two, and
    `slow_mode_fraction` is the fraction of calls in the slower mode.
    """
    of_calls, order = seconds.amax(0).sort()
    slowest = order[-max(1, round(SLOWEST * len(order))) :]
    late = seconds[:, slowest].argmin(0)
    late_rank = int(late.mode().values)
    waited = (seconds.amax(0) - seconds.amin(0))[slowest]
    found = {
        "call_p50_seconds": float(of_calls.quantile(0.5)),
        "call_p99_seconds": float(of_calls.quantile(0.99)),
        "call_largest_seconds": float(of_calls[-1]),
        "late_rank": float(late_rank),
        "late_fraction": float((late == late_rank).double().mean()),
        "late_seconds": float(waited.median()),
    }
    if modes := two_modes(of_calls.tolist()):
        names = ("fast_mode_seconds", "slow_mode_seconds", "slow_mode_fraction")
        found |= dict(zip(names, modes, strict=True))
    return found
