"""The verdict of an A/B run, which alternates between a base and a candidate version of the code.

`Decision` makes a row for each metric of each test. `ab_answer` sums up all rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

import numpy as np

from ddpperf.verdict.estimates import Control, MetricEstimates
from ddpperf.verdict.run_verdict import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.two_stage_test import (
    MOST_SETS,
    UNCHANGED_P,
    Finding,
    LogEstimates,
    Noise,
    class_noise,
    detection,
    look,
    moderated_noise,
    negative_control_findings,
    screen,
)

LEAST_SPREAD = 0.0005  # log ratio between process sets; the standard error of ten quiet rounds' median
MOST_ADVISED = 12  # process sets per side; nobody would wait for more
MOST_UNDECIDED = 0.05  # the largest fraction of undecided tests in a PASS
CONTROLS: tuple[tuple[Control, tuple[Finding, ...], str], ...] = (
    ("negative", (Finding.UNCHANGED, Finding.UNDECIDED), "a copy of memory"),
    ("positive", (Finding.SUSPECT, Finding.WORSE), "a deliberately slowed step"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The finding for one metric of one test in an A/B run.

    `base` and `candidate` are geometric means over process sets. `ratio` is candidate over base,
    and `low` and `high` are its 95% interval. `detectable` is the smallest worsening that is found
    with 95% probability, as a fraction. In a confirmation it is the upper end of the interval.
    `tolerance` is the largest change that counts as unchanged, as a fraction. `sets` is the number
    of process sets of each of base and candidate that would decide this row, or None if that is
    more than `MOST_SETS`. `gated` says whether a worse value fails the run. `primary` says whether
    this metric represents its test. `confirmed` says whether a repeated measurement on new process
    sets contributed to the finding.
    """

    test: str
    metric: str
    base: float
    candidate: float
    ratio: float
    low: float
    high: float
    detectable: float
    tolerance: float
    sets: int | None
    finding: Finding
    gated: bool
    primary: bool
    control: Control | None = None
    confirmed: bool = False

    @property
    def suspect(self) -> bool:
        """Whether this metric looks worse and must be measured again."""
        return self.gated and self.finding is Finding.SUSPECT

    @property
    def undecided(self) -> bool:
        """Whether a change of this metric as large as its tolerance may have been missed."""
        return self.finding is Finding.UNDECIDED


class Decision:
    """The findings of an A/B run for all metrics of all tests.

    The constructor judges the first measurement. `look` decides suspected regressions and undecided
    tests by repeated measurements on new process sets. `suspected` names tests that another
    comparison found slower. A first measurement that contradicts this may have been disturbed, so it is
    repeated, and only the new process sets decide.

    `missing` says for each test why one of its gated metrics cannot be judged.
    """

    def __init__(
        self,
        estimates: Iterable[MetricEstimates],
        settings: DecisionSettings,
        suspected: Collection[str] = (),
    ) -> None:
        estimates = list(estimates)
        self.settings = settings
        self._suspected = suspected
        self.missing = {entry.test: entry.missing for entry in estimates if entry.missing and entry.gated}
        complete = [entry for entry in estimates if not entry.missing]
        # A measurement that several tests share is tested once.
        tested = {
            (entry.metric, entry.base, entry.candidate)
            for entry in complete
            if entry.gated and not entry.definition.exact
        }
        self.gated = max(1, len(tested))
        self._screened = {(entry.test, entry.metric): entry for entry in complete}
        self._again: dict[tuple[str, str], MetricEstimates] = {}  # of all looks
        self._class_noise: dict[tuple[str, str], tuple[float, float]] = {}  # by test and metric
        self._slower: dict[str, bool] = {}  # by test: whether its time is longer, by any amount
        self.rows: list[Row] = []
        for metric in dict.fromkeys(entry.metric for entry in complete):
            group = [entry for entry in complete if entry.metric == metric]
            if not group[0].definition.exact:
                self._learn_noise(group)
            for tolerance in dict.fromkeys(entry.tolerance for entry in group):
                self.rows += self._judge([entry for entry in group if entry.tolerance == tolerance])
        self._suspects = {(row.test, row.metric) for row in self.rows if row.suspect}
        self._excuse_speedups()

    def open_tests(self) -> list[str]:
        """Return the tests to measure again: suspected tests, the largest change first, then undecided tests.

        The primary metric of a test says whether the test is open. A test that got worse by one metric
        is not measured again for another metric.
        """
        worse = worse_tests(self.rows)
        suspects = sorted(
            (row for row in self.rows if row.suspect), key=lambda row: -abs(math.log(row.ratio))
        )
        primaries = [row for row in self.rows if row.primary and row.gated and not row.control]
        still_open = [row.test for row in primaries if self._is_open(row)]
        in_order = dict.fromkeys([*(row.test for row in suspects), *still_open])
        return [test for test in in_order if test not in worse]

    def _is_open(self, row: Row) -> bool:
        """Return whether a worsening as large as the tolerance is neither found nor excluded."""
        if not self.settings.confirms:
            return row.undecided
        if row.finding is Finding.WORSE:
            return False
        contradicts = row.test in self._suspected and not row.confirmed
        return contradicts or row.detectable > row.tolerance

    def look(self, again: Iterable[MetricEstimates]) -> None:
        """Decide suspected and undecided tests by a repeated measurement on new process sets.

        A second repetition adds its process sets to those of the first repetition.
        """
        for entry in again:
            key = entry.test, entry.metric
            if not entry.missing and key in self._screened:
                # The metric stays gated, even if the new process sets put it into another noise class.
                known = self._again.get(key, replace(self._screened[key], base=(), candidate=()))
                self._again[key] = _together(known, entry)
        for place, row in enumerate(self.rows):
            key = row.test, row.metric
            if (fresh := self._again.get(key)) is None or not (row.suspect or self._is_open(row)):
                continue
            suspect = key in self._suspects
            alone = suspect or row.test in self._suspected
            estimates = fresh if alone else _together(self._screened[key], fresh)
            (self.rows[place],) = self._judge([estimates], suspect=suspect)
        for (_, metric), fresh in self._again.items():
            if metric == "time":
                self._judge([fresh], suspect=True)  # updates self._slower
        self._excuse_speedups()

    def end(self) -> None:
        """Add the suspected tests that could not be measured again to the missing tests."""
        worse = worse_tests(self.rows)
        for row in self.rows:
            if row.suspect and row.test not in worse:
                found = f"{row.metric} {row.ratio:.3f} times the base's"
                self.missing.setdefault(row.test, f"could not be measured again, with {found}")

    def _excuse_speedups(self) -> None:
        """Change the finding of a worse speedup to undecided unless the step itself got slower.

        The speedup t(1)/t(N) also falls if one device gets faster. "Slower" means by any amount,
        significant at the level of the suite over all gated metrics.
        """
        for place, row in enumerate(self.rows):
            if row.metric == "speedup" and row.finding is Finding.WORSE and not self._slower.get(row.test):
                self.rows[place] = replace(row, finding=Finding.UNDECIDED)

    def _judge(self, group: Sequence[MetricEstimates], *, suspect: bool | None = None) -> list[Row]:
        """Return the findings for one metric of tests that share a tolerance and a number of process sets.

        `suspect` is None for the screening; later it says whether the screening found it worse.
        """
        if group[0].definition.exact:
            return [_exact_row(entry) for entry in group]
        settings = self.settings.of(group[0].metric)
        if (tolerance := group[0].tolerance) is not None and tolerance > settings.margin:
            settings = replace(settings, tolerance=tolerance)
        sign = np.array([entry.sign for entry in group])
        base, candidate = ([entry.base for entry in group], [entry.candidate for entry in group])
        logs = LogEstimates(sign[:, None] * np.log(base), sign[:, None] * np.log(candidate))
        noise, effect = self._noise(group, logs), logs.effect
        error = noise.standard_error(logs.sets)
        if suspect is None:
            findings = screen(logs, noise, settings, self.gated, decides=self.settings.confirms)
        else:
            findings = look(logs, noise, settings, self.gated, suspect=suspect)
        control_findings = negative_control_findings(logs, noise, settings)
        if group[0].metric == "time":
            slower = effect > noise.quantile(settings.suite_alpha / self.gated) * error
            self._slower |= {entry.test: bool(slower[place]) for place, entry in enumerate(group)}
        half_width = noise.quantile(UNCHANGED_P) * error
        ratio, low, high = (np.exp(sign * effect + side * half_width) for side in (0, -1, 1))
        worsening, needed = detection(noise, settings, self.gated, logs.sets if suspect is False else None)
        if self.settings.confirms:
            worsening = np.maximum(effect + half_width, 0.0)
        undecided = [finding is Finding.UNDECIDED for finding in findings]
        needed = np.where(undecided, np.maximum(needed, logs.sets + 1), needed)
        return [
            Row(
                test=entry.test,
                metric=entry.metric,
                base=geometric_mean(entry.base),
                candidate=geometric_mean(entry.candidate),
                ratio=float(ratio[place]),
                low=float(low[place]),
                high=float(high[place]),
                detectable=math.expm1(worsening[place]),
                tolerance=math.expm1(settings.tolerance),
                sets=int(needed[place]) if needed[place] <= MOST_SETS else None,
                finding=(control_findings if entry.control == "negative" else findings)[place],
                gated=entry.gated,
                primary=entry.primary,
                control=entry.control,
                confirmed=suspect is not None,
            )
            for place, entry in enumerate(group)
        ]

    def _learn_noise(self, group: Sequence[MetricEstimates]) -> None:
        """Store the usual noise of a metric in each class of similar tests, for later measurements."""
        logs = LogEstimates(np.log([entry.base for entry in group]), np.log([e.candidate for e in group]))
        by_class = _noise_by_class(group, logs)
        self._class_noise |= {(entry.test, entry.metric): by_class[entry.noise_class] for entry in group}

    def _noise(self, group: Sequence[MetricEstimates], logs: LogEstimates) -> Noise:
        """Return the noise of a metric in each test, shrunk towards the noise of similar tests.

        A noisy positive control is shrunk, too: it cannot make a slower test pass, only prevent a PASS.
        """
        variances, freedoms = np.array([self._class_noise[entry.test, entry.metric] for entry in group]).T
        positive = np.array([entry.control == "positive" for entry in group])
        return moderated_noise(logs, Noise(variances, freedoms), LEAST_SPREAD**2, positive)


def _together(first: MetricEstimates, second: MetricEstimates) -> MetricEstimates:
    """Return the estimates of one metric from the process sets of two measurements."""
    base, candidate = first.base + second.base, first.candidate + second.candidate
    return replace(first, base=base, candidate=candidate)


def _noise_by_class(
    group: Sequence[MetricEstimates], logs: LogEstimates
) -> dict[Hashable, tuple[float, float]]:
    """Return the noise variance and its degrees of freedom for each class of similar metrics.

    A measurement that several tests share counts once. A control measurement counts only in a class
    without tests.
    """
    with_tests = {entry.noise_class for entry in group if entry.control is None}
    unique = {
        (entry.noise_class, entry.base, entry.candidate): place
        for place, entry in enumerate(group)
        if entry.control is None or entry.noise_class not in with_tests
    }
    places = list(unique.values())
    classes = [group[place].noise_class for place in places]
    usual = class_noise(LogEstimates(logs.base[places], logs.candidate[places]), classes, LEAST_SPREAD**2)
    return dict(zip(classes, zip(usual.variance, usual.degrees_of_freedom, strict=True), strict=True))


def _exact_row(estimates: MetricEstimates) -> Row:
    """Return the finding for a metric without noise: any increase of its maximum is worse."""
    base, candidate = max(estimates.base), max(estimates.candidate)
    ratio = candidate / base if base else max(1.0, candidate)  # if the base has 0 bytes, divide by one byte
    finding = Finding.WORSE if candidate > base else Finding.BETTER if candidate < base else Finding.UNCHANGED
    return Row(
        test=estimates.test,
        metric=estimates.metric,
        base=base,
        candidate=candidate,
        ratio=ratio,
        low=ratio,
        high=ratio,
        detectable=0.0,
        tolerance=0.0,
        sets=len(estimates.base),
        finding=finding,
        gated=estimates.gated,
        primary=False,
    )


# --- the result of all rows


def worse_tests(rows: Sequence[Row]) -> dict[str, str]:
    """Return a phrase for each worse test that compares it with the base, the largest change first."""
    worse: dict[str, list[str]] = {}
    sizes: dict[str, float] = {}
    for row in rows:
        if row.gated and row.finding is Finding.WORSE:
            where = ", measured again on new process sets" if row.confirmed else ""
            found = f"its {row.metric} is {row.ratio:.3f} times the base's"
            worse.setdefault(row.test, []).append(f"{found} ({row.low:.3f} to {row.high:.3f}{where})")
            sizes[row.test] = max(sizes.get(row.test, 0.0), abs(math.log(row.ratio)))
    in_order = sorted(worse, key=lambda test: -sizes[test])
    return {test: f"is worse: {'; '.join(worse[test])}" for test in in_order}


def times(rows: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """Return the seconds of base and candidate for each test, as measured."""
    return {row.test: (row.base, row.candidate) for row in rows if row.metric == "time"}


def ab_answer(
    rows: Sequence[Row],
    missing: Mapping[str, str],
    *,
    problems: Sequence[str] = (),
    unmeasured: Sequence[str] = (),
) -> Answer:
    """Return the result of an A/B run from the findings for all metrics of its tests.

    `missing` says for each test why it cannot be judged. `problems` says why the whole run cannot
    be judged. `unmeasured` lists the tests that the candidate cannot measure.
    """
    primaries = [row for row in rows if row.primary and row.gated]
    reach = [row.detectable for row in primaries] or [math.nan]
    untrusted, blind = control_problems(rows)
    answer = Answer(
        worse=worse_tests(rows),
        seconds=times(rows),
        untrusted=untrusted,
        undecided=[
            *problems,
            *(f"{test} {why}" for test, why in missing.items()),
            *blind,
            *_undecided(primaries, unmeasured),
        ],
        summary="nothing worse than the base: half of the tests would have shown a slow-down of "
        f"{median(reach):.1%}, all of them {max(reach):.1%}",
    )
    return replace(answer, unfit=[*answer.regressions, *answer.untrusted, *answer.undecided])


def control_problems(rows: Sequence[Row], *, positive_needed: bool = True) -> tuple[list[str], list[str]]:
    """Return two lists of sentences: why no finding counts, and why a worsening may have been missed.

    If the negative control fails, changes may be found that do not exist. If the positive control fails,
    changes may be missed, but a worse test stays worse. A missing or noisy control proves nothing.
    `positive_needed` says whether a missing positive control is a problem.
    """
    by_control = {row.control: row for row in rows}
    untrusted: list[str] = []
    blind: list[str] = []
    for control, expected, what in CONTROLS:
        if (row := by_control.get(control)) is None:
            if positive_needed or control == "negative":
                blind.append(f"the {control} control was not measured")
            continue
        interval = f"{row.low:.3f} to {row.high:.3f}"
        if row.finding not in expected:
            found = f"{row.finding}, at {row.ratio:.3f} times ({interval})"
            sentence = f"the {control} control failed: {what} was found {found}"
            (untrusted if control == "negative" else blind).append(sentence)
        if control == "negative" and row.high / row.ratio - 1 > row.tolerance:
            blind.append(f"the negative control is too noisy: {interval} times")
    return untrusted, blind


def _undecided(primaries: Sequence[Row], unmeasured: Sequence[str]) -> list[str]:
    """Return why too many tests are undecided; empty if at most 5% of the tests are undecided."""
    undecided = [row for row in primaries if row.undecided]
    total = len(primaries) + len(unmeasured)
    if primaries and len(undecided) + len(unmeasured) <= MOST_UNDECIDED * total:
        return []
    sentences = [] if primaries else ["no test has a metric that can be judged"]
    if undecided:
        needed = [row.sets or 0 for row in undecided]
        advice = f"--replicates {max(needed)} would decide them"
        if not all(needed) or max(needed) > MOST_ADVISED:
            advice = "this machine is too noisy for them; repeat the run when it is quieter, or deselect them"
        example = f"such as {undecided[0].test}"
        sentences.append(f"{len(undecided)} of {total} tests are undecided, {example}; {advice}")
    if unmeasured:
        cannot = "cannot be measured by the candidate"
        sentences.append(
            f"{len(unmeasured)} of {total} tests {cannot}, such as {unmeasured[0]}; deselect them"
        )
    return sentences
