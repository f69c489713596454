"""This run's measurements beside a baseline's: a change where they are comparable, a hole where they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import COPY, PastRun
from ddpperf.verdict.change import Change, Controls
from ddpperf.verdict.run_history import bounds, drift, first_and_last, series, spread
from ddpperf.verdict.settings import DecisionSettings

# Above this, the step's time over the GPU's own for it, a step waits for the CPU's launches; unless it is captured, its time
# then moves from run to run, and is for information.
LAUNCH_BOUND = 1.05
CPU_LIMIT = 1.25  # instead, how many times the CPU seconds of a step are too many

LARGEST_LOG = 700.0  # of a ratio that a float can hold


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """changes: by test id, what could be compared. holes: by test id, why the others could not.

    drifts: by test id, where there are runs enough, the log of how much slower the last five are than the first five promoted;
    0 where that is no more than chance. controls: of the comparison itself; None of one whose run had none.
    """

    baseline: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    drifts: Mapping[str, float] = field(default_factory=dict)
    controls: Controls | None = None

    @property
    def slower(self) -> dict[str, Change]:
        return {test: change for test, change in self.changes.items() if change.slower}

    @property
    def suspects(self) -> dict[str, Change]:
        """Slower by more than chance makes one test, but not one of this many: A/B against the baseline's code can tell."""
        return {test: change for test, change in self.changes.items() if change.suspect}

    def median_shift(self) -> float | None:
        """The median, over compared times, of log(now) - log(then): positive if the suite got slower; None without any."""
        shifts = [log(change.ratio) for change in self.changes.values() if change.quantity == "step"]
        return median(shifts) if shifts else None

    def failures(self) -> dict[str, str]:
        """By test that is slower, how much."""
        return {
            test: f"is slower: {change.ratio:.2f} times its {change.quantity} in {self.baseline}, limit {change.limit:.4g}"
            for test, change in self.slower.items()
        }

    def untrusted(self) -> list[str]:
        """What says that the machine, or the measuring, is not what it was."""
        return self.controls.failed() if self.controls is not None else []

    def unseen(self) -> list[str]:
        """What could not be compared, a sentence each."""
        missing = [f"{test} {why}" for test, why in self.missing.items()]
        return [*(self.controls.missing if self.controls is not None else ()), *missing]

    def unfit(self) -> list[str]:
        """Why no later run should be compared with this one: what is new in it is fit, what is slower, or doubtful, is not."""
        return [*(f"{test} {how}" for test, how in self.failures().items()), *self.untrusted()]

    def passed(self) -> str:
        """What a pass means, and how much it would let through."""
        limits = [change.limit for change in self.changes.values()]
        suspects = len(self.suspects)
        but = f", but {suspects} {'is a suspect' if suspects == 1 else 'are suspects'}" if suspects else ""
        return f"none slower than in {self.baseline} by more than its limit{_widths(limits)}{but}"


def compare(
    now: Mapping[str, Measured],
    then: Mapping[str, Measured],
    *,
    expected: Collection[str],
    baseline: str,
    limit: float | None,
    settings: DecisionSettings,
    history: Sequence[PastRun] = (),
) -> Comparison:
    """Compare test by test, times or, of what launches bound then and now, CPU seconds; comparable means equal id and spec.

    expected: the ids of the tests that this run had to compare. baseline: what to call the other run. limit: the ratio of times
    above which a step is slower; None for each test's own, by how far its runs in `history`, oldest first, differ. CPU seconds
    have `CPU_LIMIT`.

    The reference is the run that is named, with the error of one run against one, also where the history has more: their mean
    is another code's time as soon as a change was accepted. Simulated with 20 runs that differ by 0.5 %: of tests that got 5 %
    slower the mean calls 98 % so, the named run 43 %, and 99 % suspects. But once a loss of 10 % was accepted, which the last 5
    runs have, the mean calls 87 % of unchanged tests slower, the named run none; and once a gain of 10 % was, of the tests that
    lose it again the mean makes none a suspect, the named run all.
    """
    present = sorted(test for test in expected if test in now or test in then)
    missing = {
        test: why for test in present if (why := _missing_reason(now.get(test), then.get(test), baseline))
    }
    compared = [test for test in present if test not in missing]
    timed = [test for test in compared if not _by_cpu_seconds(then[test], now[test])]
    changes, drifts = {}, {}
    for test in compared:
        if test not in timed:
            changes[test] = _of_cpu_seconds(then[test], now[test])
            continue
        changes[test] = _of_times(test, now[test], then[test], history, settings, len(timed), limit)
        if ends := first_and_last(history, test, now[test]):
            usual = _usual_spread(then[test], now[test], settings)
            drifts[test] = drift(*ends, usual, settings.default.suite_alpha / len(timed))
    return Comparison(baseline=baseline, changes=changes, missing=missing, drifts=drifts)


def copies(
    now: Measured | None,
    then: Measured | None,
    *,
    baseline: str,
    limit: float | None,
    settings: DecisionSettings,
    history: Sequence[PastRun] = (),
    compared: int,
) -> Controls:
    """The negative control: a run's copy of memory beside the baseline's, by the limit of a test among `compared` others.

    limit: of the tests, if one was given; that of a copy is not less.
    """
    if (why := _missing_reason(now, then, baseline)) or now is None or then is None:
        return Controls(missing=[f"the negative control, {COPY}, {why}"])
    change = _of_times(COPY, now, then, history, settings, compared + 1, None)
    return Controls(negative=replace(change, limit=max(change.limit, limit or 0.0)))


def _widths(limits: Sequence[float]) -> str:
    if not limits:
        return ""
    most = f"{max(limits):.4g}"
    return (
        f" ({most})"
        if min(limits) == max(limits)
        else f" ({median(limits):.4g} for half of the tests, at most {most})"
    )


def _missing_reason(now: Measured | None, then: Measured | None, baseline: str) -> str:
    """Why these two cannot be compared, of which one was measured; empty if they can."""
    if then is None:
        return f"is not in {baseline}"
    if now is None:
        return f"is in {baseline} but was not measured"
    if now.spec != then.spec:
        return f"measures another spec than in {baseline}"
    for run, where in ((now, "this run"), (then, baseline)):
        if any(run.counter("resumed_epochs").values()):
            return f"went on from a checkpoint in {where}, so that its seconds are not all of it"
    if _by_cpu_seconds(then, now) and not (_cpu_seconds(then) and _cpu_seconds(now)):
        side = "this run" if _cpu_seconds(then) else baseline
        return f"is bound by launches, and {side} has no CPU seconds of it to compare"
    return ""


def _of_cpu_seconds(then: Measured, now: Measured) -> Change:
    return Change(
        then_seconds=_cpu_seconds(then),
        now_seconds=_cpu_seconds(now),
        limit=CPU_LIMIT,
        quantity="CPU seconds",
    )


def _of_times(
    test: str,
    now: Measured,
    then: Measured,
    history: Sequence[PastRun],
    settings: DecisionSettings,
    compared: int,
    limit: float | None,
) -> Change:
    """limit: None for the test's own, as one of the `compared`."""
    between = spread(series(history, test, now), _usual_spread(then, now, settings))
    margin, suite_alpha = settings.of("time").margin, settings.default.suite_alpha
    own = bounds(between, margin=margin, suite_alpha=suite_alpha, compared=compared)
    suspect, slower = (exp(min(bound, LARGEST_LOG)) for bound in (own.suspect, own.slower))
    return Change(
        then_seconds=median(then.all_step_seconds()),
        now_seconds=median(now.all_step_seconds()),
        limit=limit or slower,
        suspect_limit=None if limit else suspect,
    )


def _usual_spread(then: Measured, now: Measured, settings: DecisionSettings) -> float:
    """The standard deviation between runs of such a test: it is quiet if its rounds are in both runs."""
    quiet = all(_is_quiet(side.all_step_seconds(), settings.quiet_iqr) for side in (then, now))
    return settings.run_spread if quiet else settings.noisy_run_spread


def _by_cpu_seconds(then: Measured, now: Measured) -> bool:
    """Whether launches bound both, or what is known of it, and no graph replays them: else the times say more."""
    return (
        is_launch_bound(then) and not then.spec.captured and (is_launch_bound(now) or not now.launch_bound())
    )


def is_launch_bound(measured: Measured) -> bool:
    """Whether a step waited for launches in the median set; not so where nothing was counted, as on a CPU."""
    by_set = measured.launch_bound()
    return bool(by_set) and median(by_set.values()) > LAUNCH_BOUND


def _cpu_seconds(measured: Measured) -> float:
    """What a step took of the CPU in the median set, of the rank that needed most; 0 unless that is a positive number."""
    by_set = measured.counter("cpu_seconds")
    return max(0.0, median(by_set.values())) if by_set else 0.0


def _is_quiet(seconds: Sequence[float], quiet_iqr: float) -> bool:
    """Whether enough rounds agree well enough for runs to differ by little."""
    return len(seconds) >= FEWEST_ROUNDS and relative_iqr(seconds) < quiet_iqr
