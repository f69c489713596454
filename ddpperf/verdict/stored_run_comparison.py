"""The comparison of a run with a stored run, test by test."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, inf, log
from statistics import median
from typing import Any, Literal

from ddpperf.analysis.run_drift import drifts
from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import COPY, Baseline, PastRun
from ddpperf.specs import RunSpec
from ddpperf.specs.collective import Call
from ddpperf.verdict.judged_work import is_informational, is_launch_bound
from ddpperf.verdict.run_history import bounds, is_comparable, noticed, series, spread, step_log
from ddpperf.verdict.settings import DecisionSettings

LARGEST_LOG = 700.0  # exp() of a greater number overflows
LEAST_LOG = 1e-6  # of a limit by which a ratio is divided; --benchmark-compare-fail=median:0% has limit 1


@dataclass(frozen=True, kw_only=True)
class Change:
    """The time of a test's step in the stored run and in this run, with the limit for their ratio.

    A test with a ratio above `limit` is slower. `quantity` says whether the step's median time or its CPU
    seconds are compared. A ratio between `suspect_limit` and `limit` is too large for chance in one
    test, but not in a suite of many tests. A slow-down by the ratio `noticed` makes the test look
    slower 19 times in 20. `suspect_limit` and `noticed` are None if `limit` alone decides. A
    slow-down by the fraction `tolerance` must be noticed. `judged` is False if the time varies too
    much to fail a run.
    """

    then_seconds: float
    now_seconds: float
    limit: float
    suspect_limit: float | None = None
    noticed: float | None = None
    quantity: Literal["step", "CPU seconds"] = "step"
    tolerance: float = 0.25
    judged: bool = True

    @property
    def ratio(self) -> float:
        """The step's seconds in this run over those in the stored run; above 1 is slower."""
        return self.now_seconds / self.then_seconds

    @property
    def shown(self) -> float:
        """The smallest slow-down, as a ratio, that screening and confirmation together would notice."""
        return self.limit if self.noticed is None else self.noticed

    @property
    def slower(self) -> bool:
        return self.judged and self.ratio > self.limit

    @property
    def suspect(self) -> bool:
        """Whether the test looks slower, but not by enough to be sure in a suite of many tests."""
        limit = self.suspect_limit
        return self.judged and limit is not None and limit < self.ratio <= self.limit


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The control measurements of a comparison with a stored run.

    The negative control is a memory copy, which must take as long as in the stored run. The
    positive control is a step of this run, timed again without and with a delay of its tolerance;
    the measured difference must be at least half of the delay. A text says why a control is missing;
    it is empty if no control was due.
    """

    negative: Change | str = ""
    positive: Change | str = ""

    @property
    def missing(self) -> list[str]:
        """One sentence for each control that was due and was not measured, with the reason."""
        return [control for control in (self.negative, self.positive) if isinstance(control, str) and control]

    def untrusted(self) -> list[str]:
        """Return a sentence if the negative control failed, so that no finding can be trusted."""
        copy = self.negative
        if isinstance(copy, str) or not (copy.slower or 1 / copy.ratio > copy.limit):
            return []
        return [
            f"the negative control failed: a copy of memory, which no change can affect, takes "
            f"{copy.ratio:.3f} times as long, allowed {1 / copy.limit:.4g} to {copy.limit:.4g}; "
            "this machine has changed"
        ]

    def blind(self) -> list[str]:
        """Return a sentence if the positive control failed, so that slower tests may be missed."""
        slowed = self.positive
        if isinstance(slowed, str) or slowed.slower:
            return []
        found = f"{slowed.ratio:.3f} times its time, limit {slowed.limit:.4g}"
        return [f"the positive control failed: a deliberately slowed step was found at {found}"]

    def measured(self) -> Mapping[str, Change]:
        """Return the control measurements that were made, by a description of the work."""
        named = {"a copy of memory": self.negative, "a slowed step": self.positive}
        return {what: change for what, change in named.items() if isinstance(change, Change)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing a run with a stored run, by test id.

    `baseline` is the stored run's name. `missing` says why a test could not be compared. `new`
    lists the tests that the stored run does not have. `drifts`
    holds the log ratio of a test's last five runs to its first five baselines, or 0 if chance
    explains the difference. Tests with too few runs have no drift.
    """

    baseline: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    new: Sequence[str] = ()
    drifts: Mapping[str, float] = field(default_factory=dict)
    controls: Controls = Controls()

    def to_json(self) -> dict[str, Any]:
        """Return this comparison as JSON, in which null stands for an infinite limit."""
        fields = asdict(self)
        for change in fields["changes"].values():
            change["limit"] = None if change["limit"] == inf else change["limit"]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `to_json` wrote."""
        changes = {test: _change(change) for test, change in fields["changes"].items()}
        controls = {
            name: control if isinstance(control, str) else _change(control)
            for name, control in fields["controls"].items()
        }
        return cls(**{**fields, "changes": changes, "controls": Controls(**controls)})

    @property
    def slower(self) -> dict[str, Change]:
        """The changes of the tests that are slower than their limits."""
        return {test: change for test, change in self.changes.items() if change.slower}

    @property
    def looks_slower(self) -> dict[str, Change]:
        """The changes of the tests whose ratio exceeds one of their two limits."""
        return {test: change for test, change in self.changes.items() if change.slower or change.suspect}

    def median_shift(self) -> float | None:
        """Return the median log ratio of this run's step times to the stored run's, or None.

        A positive ratio is slower. The result is None if no step times were compared.
        """
        shifts = [log(change.ratio) for change in self.changes.values() if change.quantity == "step"]
        return median(shifts) if shifts else None

    def to_confirm(self) -> list[str]:
        """Return the tests that an A/B run must measure again, the most suspicious first.

        These are the tests that look slower, and the tests that are too imprecise to notice a
        slow-down as large as their tolerance, the least precise first.
        """
        judged = {test: change for test, change in self.changes.items() if change.judged}
        suspicion = {
            test: log(change.ratio) / max(log(change.limit), LEAST_LOG)
            for test, change in self.looks_slower.items()
        }
        blind = {test: change.shown for test, change in judged.items() if change.shown > 1 + change.tolerance}
        by_suspicion = sorted(suspicion, key=suspicion.__getitem__, reverse=True)
        by_blindness = sorted(blind, key=blind.__getitem__, reverse=True)
        return list(dict.fromkeys([*by_suspicion, *by_blindness]))


def _change(fields: Mapping[str, Any]) -> Change:
    return Change(**{**fields, "limit": inf if fields["limit"] is None else fields["limit"]})


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A stored run to compare with, and what the limits for the growth of a step time depend on.

    `device` is "cpu" or "cuda". `limit` is the ratio above which any test is slower. If it is None,
    each test has its own limit, from how much its runs in `history` (oldest first) differ.
    """

    baseline: Baseline
    settings: DecisionSettings
    device: str
    limit: float | None = None
    history: Sequence[PastRun] = ()

    @property
    def name(self) -> str:
        """The file name of the stored run."""
        return self.baseline.path.name


def compare(now: Mapping[str, Measured], reference: Reference, expected: Collection[str]) -> Comparison:
    """Compare the step times of this run with those of a stored run, test by test.

    Tests with equal ids and equal specs are comparable. CPU seconds replace step times where
    launches bound both runs. `expected` holds the ids of the tests that this run had to compare.

    The stored run alone is the reference measurement. The mean of the history would be more
    precise, but it contains the times of other code as soon as a change was accepted. Both were
    simulated with 20 runs that differ by 0.5%. Of tests that got 5% slower, the mean finds 98%; the
    stored run finds 43% and suspects 99%. After an accepted loss of 10%, which the last 5 runs
    have, the mean calls 87% of unchanged tests slower and the stored run none. After an accepted
    gain of 10% that is lost again, the mean suspects no test and the stored run all of them.
    """
    then = reference.baseline.measured
    present = sorted(test for test in expected if test in then)
    reasons = {test: _missing_reason(now.get(test), then.get(test), reference.name) for test in present}
    missing = {test: reason for test, reason in reasons.items() if reason}
    compared = [test for test in present if test not in missing]
    timed = [test for test in compared if not _compares_cpu_seconds(then[test], now[test])]
    judged = {now[test].spec for test in timed if not is_informational(now[test].spec, reference.device)}
    changes = {
        test: _time_change(test, now[test], then[test], reference, max(1, len(judged)))
        if test in timed
        else _cpu_change(now[test], then[test])
        for test in compared
    }
    return Comparison(
        baseline=reference.name,
        changes=changes,
        missing=missing,
        new=sorted(test for test in now if test not in then),
        drifts=_drifts({test: now[test] for test in timed}, reference),
    )


def _drifts(now: Mapping[str, Measured], reference: Reference) -> dict[str, float]:
    """Return the slow drifts over the reference's history, as `run_drift.drifts` does."""
    then, settings = reference.baseline.measured, reference.settings
    past = [
        (run.promoted, {t: step_log(run.measured[t]) for t in now if is_comparable(run, t, now[t])})
        for run in reference.history
    ]
    usual = {test: _usual_spreads(then[test], now[test], settings)[0] for test in now}
    logs = {test: step_log(measured) for test, measured in now.items()}
    return drifts(past, logs, usual, settings.default.suite_alpha)


def negative_control(now: Measured | None, reference: Reference, *, compared: int) -> Change | str:
    """Compare the times of a memory copy in this run and in a stored run, or say why one is missing.

    The limit counts the copy as one more test besides the `compared` tests. It is not below the common
    limit of the tests, if there is one.
    """
    then = reference.baseline.copied
    if (why := _missing_reason(now, then, reference.name)) or now is None or then is None:
        return f"the negative control, {COPY}, {why}"
    own = _time_change(COPY, now, then, replace(reference, limit=None), compared + 1)
    return replace(own, limit=max(own.limit, reference.limit or 0.0))


def _missing_reason(now: Measured | None, then: Measured | None, baseline: str) -> str:
    """Return why a test cannot be compared with its stored run, or an empty string if it can."""
    if then is None:
        return f"is not in {baseline}"
    if now is None:
        return f"is in {baseline} but was not measured"
    if now.spec != then.spec:
        return f"measures another spec than in {baseline}"
    for run, where in ((now, "this run"), (then, baseline)):
        if any(run.counter("resumed_epochs").values()):
            return f"resumed from a checkpoint in {where}, so that its time is not that of the whole training"
    if _compares_cpu_seconds(then, now) and not (_cpu_seconds(then) and _cpu_seconds(now)):
        run_without = "this run" if _cpu_seconds(then) else baseline
        return f"is launch bound, and {run_without} has no CPU seconds of it to compare"
    return ""


def _time_change(test: str, now: Measured, then: Measured, reference: Reference, compared: int) -> Change:
    settings, spec = reference.settings, now.spec
    logs = series(reference.history, test, now)
    usual, usual_of_most = _usual_spreads(then, now, settings)
    margin, alpha = settings.of("time").margin, settings.default.suite_alpha
    suspect, _ = bounds(spread(logs, usual_of_most), margin=margin, suite_alpha=alpha, compared=compared)
    _, slower = bounds(spread(logs, usual), margin=margin, suite_alpha=alpha, compared=compared)
    least = noticed(spread(logs, usual_of_most), margin=margin)
    # A whole training has steps that no graph holds, such as its evaluations.
    in_graph = spec.captured and not isinstance(spec, RunSpec)
    tolerance = settings.tolerance_between_runs if in_graph or reference.device == "cpu" else 0.25
    return Change(
        then_seconds=median(then.all_step_seconds()),
        now_seconds=median(now.all_step_seconds()),
        limit=reference.limit or _ratio(slower),
        suspect_limit=None if reference.limit else _ratio(suspect),
        noticed=None if reference.limit else _ratio(least),
        tolerance=max(tolerance, reference.limit - 1) if reference.limit else tolerance,
        judged=not is_informational(spec, reference.device),
    )


def _cpu_change(now: Measured, then: Measured) -> Change:
    """Compare the CPU seconds of a step, for information only.

    On an H200's virtual machine, the CPU seconds of 12 process sets differ by 18%, and those of six
    runs by a factor of 1.5. So neither a stored run nor a few process sets show a slow-down of 25%.
    """
    return Change(
        then_seconds=_cpu_seconds(then),
        now_seconds=_cpu_seconds(now),
        limit=inf,
        quantity="CPU seconds",
        judged=False,
    )


def _ratio(logarithm: float) -> float:
    return exp(min(logarithm, LARGEST_LOG))


def _usual_spreads(then: Measured, now: Measured, settings: DecisionSettings) -> tuple[float, float]:
    """Return how much a test's time usually differs between runs, once for each of the two limits.

    The first value is for the limit of "slower", the second for that of "suspected". They differ
    for quiet collective calls in a CUDA graph: half of these calls differ by less than 0.3% between
    runs, as training steps do, but one of 20 by 3.7%.
    """
    quiet = all(_spread_of(run.all_step_seconds()) < settings.quiet_iqr for run in (then, now))
    steps = settings.run_spread if quiet else settings.noisy_run_spread
    if not isinstance(now.spec, Call | RunSpec):
        return steps, steps
    call = isinstance(now.spec, Call) and now.spec.captured
    return settings.call_spread, settings.run_spread if quiet and call else settings.call_spread


def _spread_of(seconds: Sequence[float]) -> float:
    """Return the spread of rounds as a fraction of their median; infinite for a single round.

    Too few rounds for an interquartile range have their whole range, which is never smaller.
    """
    if len(seconds) < 2:
        return inf
    if len(seconds) < FEWEST_ROUNDS:
        return (max(seconds) - min(seconds)) / median(seconds)
    return relative_iqr(seconds)


def _compares_cpu_seconds(then: Measured, now: Measured) -> bool:
    """Return whether kernel launches limit the step in both runs, without a CUDA graph."""
    return (
        is_launch_bound(then) and not then.spec.captured and (is_launch_bound(now) or not now.launch_bound())
    )


def _cpu_seconds(measured: Measured) -> float:
    """Return the CPU seconds of a step on the busiest rank in the median process set; 0 if unknown."""
    by_set = measured.counter("cpu_seconds")
    return max(0.0, median(by_set.values())) if by_set else 0.0
