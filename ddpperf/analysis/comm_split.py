"""Exposed communication, which computation does not hide, by three methods of measuring.

All seconds are per step and rank. (a) A difference: DDP's step minus the step of ranks that do not
communicate. (b) A trace: the time in which a rank communicates and does not compute. (c) The step's
messages alone: how long sending takes, but not how much of it is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROFILING = 0.1  # a trace is unreliable if the profiler lengthens the step by more
AGREEMENT = 0.05  # methods that differ by at most this fraction of the step agree


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Exposed communication, measured as the step time with communication minus that without.

    `exposed` is the seconds that communication adds to the step, on the rank that waits most.
    `bucket_copies` is the part of `exposed` in which DDP fills and divides its buckets and sends
    nothing. `skew` is the seconds between the first and the last rank being ready, if none waits.
    `late_rank` is the last rank.

    Under no_sync ranks skip more than messages: the bucket copies, waiting for each other, and the
    broadcasts of buffers. Communication also slows the computation beside it, because both use the
    same memory and processors.
    """

    exposed: float
    bucket_copies: float
    skew: float
    late_rank: int


def difference(ddp: Sequence[float], no_sync: Sequence[float], local: Sequence[float]) -> Difference:
    """Return exposed communication: step seconds with communication minus those without.

    The inputs are seconds[rank] of DDP, of DDP under no_sync, and of DDP that sends nothing.
    """
    return Difference(
        exposed=max(together - alone for together, alone in zip(ddp, no_sync, strict=True)),
        bucket_copies=max(filled - alone for filled, alone in zip(local, no_sync, strict=True)),
        skew=max(local) - min(local),
        late_rank=_largest(local),
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Exposed communication, measured in a profiler trace of each rank.

    `rank` is the rank that waits most. `total` is the communication of this rank, and `exposed` the
    part of it beside which nothing computes. `overlap_fraction` is the part of `total` that is not
    exposed. `least_total` is the communication of the rank that waits least, which is the time that
    sending takes. `skew` is the difference between the longest and the shortest communication of a
    rank. `late_rank` has the shortest communication, because it comes last and waits for nobody.
    """

    rank: int
    total: float
    least_total: float
    exposed: float
    overlap_fraction: float
    skew: float
    late_rank: int


def traced(total: Sequence[float], exposed: Sequence[float]) -> Traced | None:
    """Return the exposed communication from traces; None if a rank did not communicate."""
    if not all(total):
        return None
    rank = _largest(exposed)
    return Traced(
        rank=rank,
        total=total[rank],
        least_total=min(total),
        exposed=exposed[rank],
        overlap_fraction=1 - exposed[rank] / total[rank],
        skew=max(total) - min(total),
        late_rank=_largest([-seconds for seconds in total]),
    )


def _largest(seconds: Sequence[float]) -> int:
    return max(range(len(seconds)), key=seconds.__getitem__)


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


def last_rank(a: Difference, b: Traced | None, step_seconds: float, node_size: int | None = None) -> str:
    """Return a sentence that names the last rank in a step; empty if others hardly wait.

    node_size: the number of ranks of each node, whose number is then named; None on one node.
    """
    if max(a.skew, b.skew if b is not None else 0.0) <= AGREEMENT * step_seconds:
        return ""

    def named(rank: int) -> str:
        return f"rank {rank}" if node_size is None else f"rank {rank} on node {rank // node_size}"

    by_trace = f", by trace {named(b.late_rank)} by {b.skew / step_seconds:.1%}" if b is not None else ""
    return f"{named(a.late_rank)} is the last by {a.skew / step_seconds:.1%} of the step{by_trace}"
