"""Exposed communication, which computation does not hide, by three methods of measuring.

All seconds are per step and rank. (a) A difference: DDP's step minus the step of ranks that do not
communicate. (b) A trace: the time in which a rank communicates and does not compute. (c) The step's
messages alone: how long sending takes, but not how much of it is exposed.

By difference, communication contains more than messages: without it ranks also skip the bucket
copies, waiting for each other, and the broadcasts of buffers. Communication also slows the
computation beside it, because both use the same memory and processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROFILING = 0.1  # a trace is unreliable if the profiler lengthens the step by more
AGREEMENT = 0.05  # methods that differ by at most this fraction of the step agree


def longest_wait(together: Sequence[float], alone: Sequence[float]) -> float:
    """Return the seconds by which a step is longer than another, on the rank with the largest difference.

    The inputs are seconds[rank], such as those of DDP, and of DDP without communication.
    """
    return max(longer - shorter for longer, shorter in zip(together, alone, strict=True))


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Exposed communication, measured in a profiler trace of each rank.

    `rank` is the rank that waits most. `total` is the communication of this rank, and `exposed` the
    part of it beside which nothing computes. `overlap_fraction` is the part of `total` that is not
    exposed. `least_total` is the communication of the rank that waits least, because it comes last.
    This is the time that sending takes. `skew` is the difference between the longest and the
    shortest communication of a rank.
    """

    rank: int
    total: float
    least_total: float
    exposed: float
    overlap_fraction: float
    skew: float


def traced(total: Sequence[float], exposed: Sequence[float]) -> Traced | None:
    """Return the exposed communication from traces; None if a rank did not communicate."""
    if not all(total):
        return None
    rank = max(range(len(exposed)), key=exposed.__getitem__)
    return Traced(
        rank=rank,
        total=total[rank],
        least_total=min(total),
        exposed=exposed[rank],
        overlap_fraction=1 - exposed[rank] / total[rank],
        skew=max(total) - min(total),
    )


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
