"""Estimates of pairs with given ratios, and the rows and the answer that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpperf.results.outcomes import Outcome, OutcomeKind, Verdict
from ddpperf.specs import AllReduceSpec
from ddpperf.verdict.estimates import Control, Estimates, Pair, RowKey, Stage
from ddpperf.verdict.noise_classes import NoiseClass
from ddpperf.verdict.rows import Row, rows
from ddpperf.verdict.settings import Limits, Settings, read_decision
from ddpperf.verdict.verdict import Answer, Context, answer_of, decide

GPU = read_decision({})["gpu"]
CAPTURED = NoiseClass(kind="step", described="in CUDA graphs")
LIMITS = Limits(margin=0.005, tolerance=0.02)
QUIET = 0.001  # the standard deviation of a pair's log times between process sets
PASSED = Outcome(kind=OutcomeKind.PASSED)


def pair(number: int) -> Pair:
    spec = AllReduceSpec(world_size=2, nbytes=1024 * number, execution="graph")
    return Pair(base=spec, candidate=spec)


def key(number: int, metric: str = "time") -> RowKey:
    return RowKey(metric=metric, pair=pair(number))


def spread_out(sets: int, noise: float, value: float = 1.0) -> tuple[float, ...]:
    """Return values of some process sets whose mean and standard deviation are exactly these."""
    places = [place - (sets - 1) / 2 for place in range(sets)]
    deviation = (sum(place**2 for place in places) / max(1, sets - 1)) ** 0.5 or 1.0
    return tuple(value * (1 + noise * place / deviation) for place in places)


def estimate(
    number: int,
    ratio: float = 1.0,
    *,
    metric: str = "time",
    noise: float = QUIET,
    stage: Stage = Stage.FIRST,
    sets: int = 0,
    **fields: Any,
) -> Estimates:
    """Return the estimates of one metric of pair `number`, whose test is called test7 for the number 7."""
    sets = sets or {Stage.STORED: 1, Stage.FIRST: 3, Stage.REPEAT: 6}[stage]
    entry = Estimates(
        key=key(number, metric),
        tests=(f"test{number}",),
        stage=stage,
        base=spread_out(sets, noise),
        candidate=spread_out(sets, noise, ratio),
        noise_class=CAPTURED,
        limits=LIMITS,
        steps=300,
        run_spread=GPU.run_spread,
    )
    return replace(entry, **fields)


def equal(pairs: int) -> list[Estimates]:
    """Return the first estimates of the times and mean times of some pairs that did not change."""
    return [estimate(number, metric=name) for number in range(1, pairs + 1) for name in ("time", "mean_time")]


def control(kind: Control, ratio: float = 1.0, **fields: Any) -> Estimates:
    return estimate(1, ratio, key=RowKey(metric="time", control=kind), tests=(), **fields)


def controls(delayed: float = 1.02) -> list[Estimates]:
    """Return control measurements without a finding."""
    return [control(Control.COPY), control(Control.DELAYED, delayed), control(Control.BASE_ALONE)]


def judged(estimates: Sequence[Estimates], settings: Settings = GPU) -> list[Row]:
    """Return the rows of estimates; the repeats were planned for the rows that they measured."""
    tested = {entry.key for entry in estimates if entry.stage is Stage.REPEAT}
    return rows(estimates, settings, tested)


def row_of(estimates: Sequence[Estimates], settings: Settings = GPU, metric: str = "time") -> Row:
    """Return the row of test1."""
    return next(row for row in judged(estimates, settings) if row.key == key(1, metric))


def answered(estimates: Sequence[Estimates], **context: Any) -> Answer:
    """Return the answer to estimates with control measurements that found nothing."""
    every = [*estimates, *controls()]
    tested = {entry.key for entry in estimates if entry.stage is Stage.REPEAT}
    return answer_of(rows(every, GPU, tested), every, Context(**{"missing": {}} | context))


def verdict_of(answer: Answer) -> Verdict:
    return decide({"test1": PASSED}, measured={"test1"}, answer=answer)
