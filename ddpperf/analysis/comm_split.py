"""Exposed communication, which computation does not hide, by three methods of measuring.

All seconds are per step and rank. (a) A difference: DDP's step minus the step of ranks that do not
communicate. (b) A trace: the time in which a rank communicates and does not compute. (c) A
replay of the step's messages without computation: how long sending takes, but not how much of it is
exposed.

The difference contains more than messages: ranks that do not communicate also skip the bucket
copies, waiting for each other, and the broadcasts of buffers. Communication also slows down the
computation that runs at the same time, because both use the same memory and processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_PROFILING = 0.1  # a trace is unreliable if the profiler lengthens the step by more
AGREEMENT = 0.05  # methods that differ by at most this fraction of the step agree
NOT_SENDING = ("compute_seconds", "copy_seconds", "idle_seconds", "traced_step_seconds")
WITHOUT_WAITING = "comm_without_waiting_seconds"


def longest_wait(together: Sequence[float], alone: Sequence[float]) -> float:
    """Return the seconds by which a step is longer than another, on the rank with the largest difference.

    The inputs are seconds[rank], such as those of DDP, and of DDP without communication.
    """
    return max(longer - shorter for longer, shorter in zip(together, alone, strict=True))


def traced(counters: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the metrics of a process set's traces; nothing if a rank did not communicate.

    counters: the seconds of a step by rank, as in `intervals.split`. The metrics are those of the
    rank with the most exposed communication, which waits most. overlap_fraction is the part of its
    communication that is not exposed. traced_comm_skew_seconds is the difference between the longest
    and the shortest communication of a rank. comm_without_waiting_seconds is the same on all ranks.
    """
    total, exposed = counters.get("comm_seconds", ()), counters.get("exposed_comm_seconds", ())
    if not total or not all(total):
        return {}
    rank = max(range(len(exposed)), key=exposed.__getitem__)
    return {
        "traced_exposed_comm_seconds": exposed[rank],
        "traced_comm_seconds": total[rank],
        "overlap_fraction": 1 - exposed[rank] / total[rank],
        "traced_comm_skew_seconds": max(total) - min(total),
        **{name: counters[name][rank] for name in (*NOT_SENDING, WITHOUT_WAITING) if name in counters},
    }


def disagreement(
    apart: float, known: float, cause: str, step_seconds: float, traced_step_seconds: float
) -> tuple[float, str]:
    """Return (seconds by difference - by trace) / step seconds, and a sentence if this exceeds 5%.

    apart: the seconds by difference minus those by trace. known: the seconds that the difference
    contains and the trace does not. cause: what these seconds are.
    """
    fraction = apart / step_seconds
    if abs(fraction) <= AGREEMENT:
        return fraction, ""
    known_fraction = known / step_seconds
    longer = traced_step_seconds / step_seconds - 1
    reason = (
        f"exposed by difference minus by trace is {fraction:+.1%} of the step ({known_fraction:+.1%} is "
        f"{cause}, {fraction - known_fraction:+.1%} not explained); the profiler makes the step "
        f"{longer:+.1%} longer"
    )
    if abs(longer) > MOST_PROFILING:
        reason += ", too much"
    return fraction, reason
