"""How much of a step is communication, by three methods that know nothing of each other. Seconds of a step, by rank.

(a) a difference: the step of DDP less that of ranks that leave each other alone; (b) a trace: when something is sent and
nothing computed; (c) the step's messages by themselves, which says how long sending takes, not how much of it is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROFILING = (
    0.1  # of a step: what the profiler may add to it before its trace says little of the step without
)
AGREEMENT = 0.05  # of a step: how far two methods may be apart without a word


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Method (a). exposed: by how much communicating makes the step longer, on the rank that waits the most, of which
    `bookkeeping` is what DDP does besides sending: filling buckets, dividing. skew: how much later than the first the last rank
    is ready if none waits for another; late_rank: which that is.

    What ranks leave out under no_sync is more than the messages: the buckets and the division too, waiting for each other, and
    the buffers' broadcasts. And beside messages what is computed takes longer, for both use the same memory and processors.
    """

    exposed: float
    bookkeeping: float
    skew: float
    late_rank: int


def difference(ddp: Sequence[float], no_sync: Sequence[float], local: Sequence[float]) -> Difference:
    """From the seconds of a step on each rank: of DDP, under no_sync, and of DDP that fills its buckets and sends nothing."""
    _require_ranks(ddp, no_sync, local)
    return Difference(
        exposed=max(together - alone for together, alone in zip(ddp, no_sync, strict=True)),
        bookkeeping=max(filled - alone for filled, alone in zip(local, no_sync, strict=True)),
        skew=max(local) - min(local),
        late_rank=max(range(len(local)), key=local.__getitem__),
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Method (b). rank: the one that waits the most, whose figures these are. total: of all communication; exposed: that beside
    which nothing is computed; overlap_fraction: what of it is not exposed. least_total: of the rank that waits the least, which
    is what sending takes. skew: how much longer the others communicate than late_rank, the last to come, who waits for nobody.
    """

    rank: int
    total: float
    least_total: float
    exposed: float
    overlap_fraction: float
    skew: float
    late_rank: int


def traced(total: Sequence[float], exposed: Sequence[float]) -> Traced | None:
    """From the seconds of a step's communication on each rank; None where nothing was communicated."""
    _require_ranks(total, exposed)
    if not all(total):
        return None
    most = max(range(len(exposed)), key=exposed.__getitem__)
    return Traced(
        rank=most,
        total=total[most],
        least_total=min(total),
        exposed=exposed[most],
        overlap_fraction=1 - exposed[most] / total[most],
        skew=max(total) - min(total),
        late_rank=min(range(len(total)), key=total.__getitem__),
    )


def _require_ranks(*by_rank: Sequence[float]) -> None:
    if len({len(seconds) for seconds in by_rank}) != 1 or len(by_rank[0]) < 2:
        raise ValueError(
            f"communication needs the seconds of the same two ranks or more, got {[len(each) for each in by_rank]}"
        )


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """share: of the step, by which (a) finds more exposed than (b). reason: a sentence where that is more than AGREEMENT."""

    share: float
    reason: str = ""


def disagreement(a: Difference, b: Traced, step_seconds: float, traced_step_seconds: float) -> Disagreement:
    """Beside the two, a step's seconds without and with the profiler."""
    share = (a.exposed - b.exposed) / step_seconds
    if abs(share) <= AGREEMENT:
        return Disagreement(share=share)
    bookkeeping = a.bookkeeping / step_seconds
    longer = traced_step_seconds / step_seconds - 1
    reason = (
        f"difference and trace disagree by {share:+.1%} of the step: {bookkeeping:+.1%} is DDP's bookkeeping, which sends "
        f"nothing, {share - bookkeeping:+.1%} is not explained; the profiler makes the step {longer:+.1%} longer"
    )
    return Disagreement(
        share=share, reason=reason + ", so that the trace is of another one" * (longer > MOST_PROFILING)
    )


def last_rank(a: Difference, b: Traced | None, step_seconds: float) -> str:
    """Which rank the others wait for, by each method, where that is for more than AGREEMENT of a step."""
    if max(a.skew, b.skew if b is not None else 0.0) <= AGREEMENT * step_seconds:
        return ""
    by_trace = f", by trace rank {b.late_rank} by {b.skew / step_seconds:.1%}" if b is not None else ""
    return f"rank {a.late_rank} is the last by {a.skew / step_seconds:.1%} of the step{by_trace}"
