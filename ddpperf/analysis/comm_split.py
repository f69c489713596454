"""The exposed communication of a step, by independent methods. Seconds are per step and rank.

(a) A difference: DDP's step minus the step of ranks that do not communicate. (b) A trace: the time
in which something is sent and nothing computes. (c) The step's messages alone, which show how long
sending takes but not how much of it is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROFILING = 0.1  # a profiler that makes a step longer by more than this fraction traces another step
AGREEMENT = 0.05  # methods that differ by at most this fraction of the step agree


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The result of method (a).

    exposed: how much longer communication makes the step, on the rank that waits most.
    bucket_copies: the part of it in which DDP fills and divides its buckets, which sends nothing.
    skew: how much later than the first the last rank is ready if none waits. late_rank: that last
    rank.

    Under no_sync ranks skip more than messages: the buckets, waiting for each other, and the
    broadcasts of buffers. Communication also slows the computation beside it, because both use the
    same memory and processors.
    """

    exposed: float
    bucket_copies: float
    skew: float
    late_rank: int


def difference(ddp: Sequence[float], no_sync: Sequence[float], local: Sequence[float]) -> Difference:
    """Apply method (a) to the seconds[rank] of DDP, of no_sync, and of DDP that sends nothing."""
    _require_ranks(ddp, no_sync, local)
    return Difference(
        exposed=max(together - alone for together, alone in zip(ddp, no_sync, strict=True)),
        bucket_copies=max(filled - alone for filled, alone in zip(local, no_sync, strict=True)),
        skew=max(local) - min(local),
        late_rank=_largest(local),
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The result of method (b).

    rank: the rank that waits most. total, exposed: its communication, and the part beside which
    nothing computes. overlap_fraction: the part of total that is not exposed. least_total: the
    communication of the rank that waits least, which is what sending takes. skew: how much longer
    the others communicate than late_rank, which comes last and waits for nobody.
    """

    rank: int
    total: float
    least_total: float
    exposed: float
    overlap_fraction: float
    skew: float
    late_rank: int


def traced(total: Sequence[float], exposed: Sequence[float]) -> Traced | None:
    """Apply method (b) to the communication on each rank; None if a rank had none."""
    _require_ranks(total, exposed)
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


def _require_ranks(*by_rank: Sequence[float]) -> None:
    counts = [len(seconds) for seconds in by_rank]
    if len(set(counts)) != 1 or counts[0] < 2:
        raise ValueError(f"communication needs the seconds of the same two ranks or more, got {counts}")


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """How much more exposed communication (a) finds than (b), as a fraction of the step.

    reason: an explanation if the two do not agree.
    """

    fraction: float
    reason: str = ""


def disagreement(a: Difference, b: Traced, step_seconds: float, traced_step_seconds: float) -> Disagreement:
    """Compare both methods, given the seconds of a step without and with the profiler."""
    fraction = (a.exposed - b.exposed) / step_seconds
    if abs(fraction) <= AGREEMENT:
        return Disagreement(fraction=fraction)
    copies = a.bucket_copies / step_seconds
    longer = traced_step_seconds / step_seconds - 1
    reason = (
        f"difference and trace disagree by {fraction:+.1%} of the step: {copies:+.1%} is DDP's bucket "
        f"copies, which send nothing, {fraction - copies:+.1%} is not explained; the profiler makes the "
        f"step {longer:+.1%} longer"
    )
    if longer > MOST_PROFILING:
        reason += ", too much for its trace to stand for the step"
    return Disagreement(fraction=fraction, reason=reason)


def last_rank(a: Difference, b: Traced | None, step_seconds: float) -> str:
    """Return a sentence about the rank that the others wait for; empty for short waits."""
    if max(a.skew, b.skew if b is not None else 0.0) <= AGREEMENT * step_seconds:
        return ""
    by_trace = f", by trace rank {b.late_rank} by {b.skew / step_seconds:.1%}" if b is not None else ""
    return f"rank {a.late_rank} is the last by {a.skew / step_seconds:.1%} of the step{by_trace}"
