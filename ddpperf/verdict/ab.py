"""The two sides of one run, base and candidate, judged: what is found of each metric of each test, and of the whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddpperf.verdict.estimates import EXACT, Control, Reading
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.two_stage_test import (
    MOST_SETS,
    Finding,
    Look,
    Noise,
    class_variances,
    confirm,
    critical,
    minimum_detectable_effect,
    noise,
    prior_freedom,
    screen,
    sets_needed,
    untouched_findings,
)

LEAST_SPREAD = 0.0005  # between sets: what the median of ten quiet rounds leaves uncertain


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is found of a reading.

    base, candidate: geometric means over sets. ratio: candidate over base, with its 95 % interval. detectable: the least change
    for the worse that is found with a probability of 95 %, as a fraction. tolerance: what counts as unchanged, as a fraction.
    sets: how many a side would detect a change of the tolerance, more than it had where they did not decide; None where more
    than `MOST_SETS` would. look: 2 if fresh sets decided.
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
    look: int = 1

    @property
    def undecided(self) -> bool:
        """Whether nothing is known, or what is tolerated could not have been detected."""
        return self.finding is Finding.UNDECIDED or (
            self.finding is Finding.UNCHANGED and self.detectable > self.tolerance
        )


class Decision:
    """A run's readings, judged: `rows` after the first look; `confirm` with the suspects' readings from fresh sets.

    holes: by test, why one of its gated metrics cannot be judged. suspects_only: of suspects that something else found, which
    have had no first look of this kind, and whose second one cannot count on its level.
    """

    def __init__(
        self, readings: Iterable[Reading], settings: DecisionSettings, *, suspects_only: bool = False
    ) -> None:
        readings = list(readings)
        self.settings = settings
        self.screened = not suspects_only
        self.missing = {each.test: each.missing for each in readings if each.missing and each.gated}
        whole = [each for each in readings if not each.missing]
        self._metrics = max(1, sum(each.gated and each.metric not in EXACT for each in whole))
        self.gated = (
            math.ceil(self._metrics / settings.default.screen_alpha) if suspects_only else self._metrics
        )
        self._usual: dict[
            tuple[str, str], tuple[float, float]
        ] = {}  # variance and freedom, by test and metric
        self._slower: dict[str, bool] = {}  # by test, whether its time surely is, by however little
        self.rows: list[Row] = []
        for metric in dict.fromkeys(each.metric for each in whole):
            self.rows += self._judged(
                [each for each in whole if each.metric == metric], look=2 if suspects_only else 1
            )
        self._excuse_speedups()

    def suspects(self) -> list[str]:
        """The tests to be measured again, on fresh sets."""
        return list(
            dict.fromkeys(row.test for row in self.rows if row.gated and row.finding is Finding.SUSPECT)
        )

    def confirm(self, again: Iterable[Reading]) -> None:
        """Decide the suspects by their new readings; what has none stays a suspect, and its test becomes a hole."""
        found = {(each.test, each.metric): each for each in again if not each.missing}
        for place, row in enumerate(self.rows):
            if row.gated and row.finding is Finding.SUSPECT:
                if reading := found.get((row.test, row.metric)):  # gated as it was: else it would be let off
                    (self.rows[place],) = self._judged(
                        [replace(reading, gated=True, primary=row.primary)], look=2
                    )
                else:
                    self.missing[row.test] = (
                        f"could not be measured again, with {row.metric} {row.ratio:.3f} times the base's"
                    )
        self._excuse_speedups([each for (_, metric), each in found.items() if metric == "time"])

    def _excuse_speedups(self, times: Sequence[Reading] = ()) -> None:
        """A speedup that is less because the one device got faster is no failure: the step must have got slower, by however
        little, beyond what chance makes of one among all gated metrics.

        times: measured again, where they were.
        """
        for each in times:
            self._judged([each], look=2)
        for place, row in enumerate(self.rows):
            if row.metric == "speedup" and row.finding is Finding.WORSE and not self._slower.get(row.test):
                self.rows[place] = replace(row, finding=Finding.UNDECIDED)

    def _judged(self, readings: Sequence[Reading], *, look: int) -> list[Row]:
        """A row for each reading, all of one metric and one number of sets."""
        if readings[0].metric in EXACT:
            return [_exact(reading) for reading in readings]
        settings = self.settings.of(readings[0].metric)
        signs = np.array([[each.sign] for each in readings])
        seen = Look(
            signs * np.log([each.base for each in readings]),
            signs * np.log([each.candidate for each in readings]),
        )
        spread = self._noise(readings, seen)
        judge = screen if look == 1 else confirm
        findings = judge(seen, spread, settings, self.gated)
        untouched = untouched_findings(seen, spread, settings)
        if readings[0].metric == "time":
            slower = seen.effect > critical(
                settings.suite_alpha / self._metrics, spread.freedom
            ) * spread.error(seen.sets)
            self._slower |= {reading.test: bool(slower[place]) for place, reading in enumerate(readings)}
        reach = critical(0.025, spread.freedom) * spread.error(seen.sets)
        detectable = np.expm1(minimum_detectable_effect(spread, settings, self.gated, screened=self.screened))
        needed = sets_needed(spread, settings, self.gated, screened=self.screened)
        needed = np.where(
            [each is Finding.UNDECIDED for each in findings], np.maximum(needed, seen.sets + 1), needed
        )
        return [
            Row(
                test=reading.test,
                metric=reading.metric,
                base=_mean(reading.base),
                candidate=_mean(reading.candidate),
                ratio=math.exp(reading.sign * seen.effect[place]),
                low=math.exp(reading.sign * seen.effect[place] - reach[place]),
                high=math.exp(reading.sign * seen.effect[place] + reach[place]),
                detectable=float(detectable[place]),
                tolerance=math.expm1(settings.tolerance),
                sets=int(needed[place]) if needed[place] <= MOST_SETS else None,
                finding=untouched[place] if reading.control == "negative" else findings[place],
                gated=reading.gated,
                primary=reading.primary,
                control=reading.control,
                look=look,
            )
            for place, reading in enumerate(readings)
        ]

    def _noise(self, readings: Sequence[Reading], seen: Look) -> Noise:
        """With what is usual among the readings of one kind, which the first look says for the second, too."""
        keys = [(each.test, each.metric) for each in readings]
        if not all(key in self._usual for key in keys):
            usual = _usual_noise(readings, seen)
            self._usual |= {key: usual[each.kind] for key, each in zip(keys, readings, strict=True)}
        variances, freedoms = zip(*(self._usual[key] for key in keys), strict=True)
        return noise(seen, np.array(variances), np.array(freedoms), LEAST_SPREAD**2)


def _usual_noise(readings: Sequence[Reading], seen: Look) -> dict[Hashable, tuple[float, float]]:
    """By kind, what is usual among its members: the variance, and its degrees of freedom. What several tests share was measured
    once, and counts so; a control only of a kind that no test has."""
    tests = {each.kind for each in readings if each.control is None}
    once = {
        (each.kind, each.base, each.candidate): place
        for place, each in enumerate(readings)
        if each.control is None or each.kind not in tests
    }
    places = list(once.values())
    kinds = [readings[place].kind for place in places]
    members = Look(seen.base[places], seen.candidate[places])
    variances, freedoms = class_variances(members, kinds, LEAST_SPREAD**2), prior_freedom(members, kinds)
    return {kind: (float(variances[place]), float(freedoms[place])) for place, kind in enumerate(kinds)}


def _mean(values: Collection[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _exact(reading: Reading) -> Row:
    """Of a metric that has no noise: any set of the candidate's that has more is worse."""
    base, candidate = max(reading.base), max(reading.candidate)
    ratio = candidate / base if base else max(1.0, candidate)  # of what was not sent at all, over one byte
    finding = Finding.WORSE if candidate > base else Finding.BETTER if candidate < base else Finding.UNCHANGED
    return Row(
        test=reading.test,
        metric=reading.metric,
        base=base,
        candidate=candidate,
        ratio=ratio,
        low=ratio,
        high=ratio,
        detectable=0.0,
        tolerance=0.0,
        sets=len(reading.base),
        finding=finding,
        gated=reading.gated,
        primary=False,
    )
