"""What the control measurements say: whether the findings can be trusted, and what may be missed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median

from ddpperf.results.outcomes import AGAIN, Reason
from ddpperf.verdict.estimates import Control, Estimates, Stage
from ddpperf.verdict.rows import Row, noises

COPIES = (Control.COPY, Control.HOST_COPY)
LEAST_SHOWN = 0.75  # of a delay
QUIETER = f"end other programs on this machine, then {AGAIN}"


def untrusted(found: Sequence[Row], estimates: Sequence[Estimates]) -> list[Reason]:
    """Return why findings may be wrong, so that none counts.

    A copy of memory must take as long in base and candidate. The base's process sets must agree with
    each other: if one of them is slower in most tests, so may be a set of the candidate.
    """
    reasons = []
    for row in found:
        if row.key.control in COPIES and row.limits is not None:
            margin = 1 + row.limits.margin
            if row.low > margin or row.high < 1 / margin:
                what = f"a {row.key.control}, which no change can affect, takes {_in_candidate(row)}"
                reasons.append(Reason(f"the negative control failed: {what}", QUIETER))
    if unlike := _unlike_base(estimates):
        reasons.append(Reason(unlike, QUIETER))
    return reasons


def _unlike_base(estimates: Sequence[Estimates]) -> str:
    """Return a sentence if one of the base's process sets differs from the others in most tests.

    The offset of a set in one test is its log time minus the mean over the base's sets, in standard
    deviations between process sets. Its median over n tests stays below 0.5 + 3.75 / sqrt(n) in 99.5% of
    simulated runs of equal sets.
    """
    timed = [
        entry
        for entry in estimates
        if entry.stage is Stage.FIRST and entry.key.metric == "time" and entry.key.control is None
        if not entry.missing
    ]
    sets = max((len(entry.base) for entry in timed), default=0)
    timed = [entry for entry in timed if len(entry.base) == sets]
    noise = noises({entry.key: [entry] for entry in timed})
    offsets: list[list[float]] = []
    for entry in timed:
        logs = [math.log(value) for value in entry.base]
        deviation = math.sqrt(noise[entry.key].variance)
        offsets.append([(value - mean(logs)) / deviation for value in logs])
    medians = [median(of_set) for of_set in zip(*offsets, strict=True)]
    worst = max(medians, key=abs, default=0.0)
    if not timed or abs(worst) <= 0.5 + 3.75 / math.sqrt(len(timed)):
        return ""
    how = "slower" if worst > 0 else "faster"
    return (
        f"the base's process sets differ: one is {how} than the others in most tests, by a median of "
        f"{abs(worst):.1f} standard deviations"
    )


def blind(found: Sequence[Row]) -> list[Reason]:
    """Return why a slow-down may have been missed.

    A step with a delay of its tolerance must be slower by more than its margin, and show most of its
    delay. The base must not be faster when the candidate's processes have ended.
    """
    reasons = []
    for row in found:
        tolerance = row.limits.tolerance if row.limits is not None else math.inf
        least = 1 + tolerance
        match row.key.control:
            case Control.COPY if row.high > least or row.low < 1 / least:
                allowed = f"allowed is {1 / least:.3f} to {least:.3f}"
                what = f"a {row.key.control} takes {_in_candidate(row)}, {allowed}"
                reasons.append(Reason(f"the negative control is too noisy: {what}", QUIETER))
            case Control.DELAYED if not shows_delay(row):
                takes = f"takes {row.ratio:.3f} times as long as without the delay"
                what = f"a step that was delayed by {tolerance:.0%} {takes} ({row.low:.3f} to {row.high:.3f})"
                what += f", not at least {1 + LEAST_SHOWN * tolerance:.3f} times"
                reasons.append(Reason(f"the positive control failed: {what}", QUIETER))
            case Control.BASE_ALONE if row.ratio > least:
                waiting = "while the candidate's processes wait"
                what = f"a step of the base takes {row.ratio:.2f} times as long {waiting} as without them"
                reasons.append(Reason(what, f"find what runs {waiting}, such as a busy thread or kernel"))
    return reasons


def shows_delay(row: Row) -> bool:
    """Return whether a delayed step is slower by more than its margin, and shows most of its delay."""
    assert row.limits is not None
    return row.low >= 1 + row.limits.margin and row.ratio - 1 >= LEAST_SHOWN * row.limits.tolerance


def _in_candidate(row: Row) -> str:
    return f"{row.ratio:.3f} times as long in the candidate ({row.low:.3f} to {row.high:.3f})"
