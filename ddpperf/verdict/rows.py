"""The rows of a comparison: what was found for each metric of each pair of base and candidate.

`rows` is a pure function of all estimates. The stages have different powers:

- The stored run only *clears* rows, or makes them suspicious.
- The first A/B measurement clears rows, or leaves them *open*.
- Only the fresh process sets of a repeat can make a run fail. The first measurement chose which rows
  are repeated, so the repeat's values are not biased by the choice (sample splitting, Cox 1975).

If nothing got worse by more than its margin, a run calls a row worse with at most the probability
`Settings.false_alarms`: one half in each of two repeats, divided by the number of rows that the repeats
test. The second repeat tests the sets of both repeats together. By the union bound, it does not
matter how the rows depend on each other.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import geometric_mean, mean, median
from typing import Any

from ddpperf.analysis.statistics import t_quantile
from ddpperf.specs import RunSpec
from ddpperf.verdict.estimates import Estimates, Pair, RowKey, Stage
from ddpperf.verdict.noise import Noise, moderated, pooled, prior_of
from ddpperf.verdict.noise_classes import CALLS, NoiseClass
from ddpperf.verdict.settings import Limits, Settings

REPEATS = 2  # how often open rows are measured again, at most
# Levels of one-sided tests. A row is cleared if a slow-down by its tolerance is less likely than this.
CLEAR_P = {Stage.STORED: 0.005, Stage.FIRST: 0.01, Stage.REPEAT: 0.005}
SUSPICIOUS_P = {Stage.STORED: 0.01, Stage.FIRST: 0.02, Stage.REPEAT: 0.02}
# If the standard error is below this fraction of the tolerance, equal code rarely looks worse. So the first
# measurement is less strict, and a change of a few standard errors is measured again.
PRECISE, PRECISE_P = 0.05, 0.1
FALSE_NAMES = 0.05  # the largest expected fraction of wrong names, once a row is certainly worse
STORED_FREEDOM = 8.0  # degrees of freedom of the spread between runs
HALF_NORMAL = 0.455  # the median of the square of a standard normal value


class Finding(enum.StrEnum):
    WORSE = "worse"
    NOT_WORSE = "not worse"
    UNDECIDED = "undecided"
    FOR_INFORMATION = "for information"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The finding for one metric of one pair.

    `base` and `candidate` are geometric means over process sets. `ratio` is candidate over base, and
    `low` and `high` are the ends of its interval. So `high` is the smallest slow-down that the row
    excludes. `stages` says where the values come from, `sets` and `steps` how many process sets and
    timed steps there are per side. `p` is the probability of at least this slow-down if the candidate
    is slower by the margin. `certain` marks a row that is worse at the run's false-alarm level. An
    `open` row is not cleared or is suspicious, and `order` says which open row to measure first.
    `stored_ratio` is this run's value over the stored run's; `stored_slower` says that it is slower
    at the run's false-alarm level.
    """

    key: RowKey
    tests: tuple[str, ...]
    noise_class: NoiseClass
    base: float
    candidate: float
    ratio: float
    low: float
    high: float
    limits: Limits | None
    finding: Finding
    stages: tuple[Stage, ...]
    sets: int
    steps: int
    p: float = 1.0
    certain: bool = False
    suspicious: bool = False
    order: float = 0.0
    stored_ratio: float | None = None
    stored_slower: bool = False

    @property
    def judged(self) -> bool:
        """Whether this row can fail or block a run."""
        return self.limits is not None and self.key.control is None

    @property
    def open(self) -> bool:
        """Whether this row must be measured again."""
        if not self.judged or self.finding is not Finding.UNDECIDED:
            return False
        shows = self.suspicious or (self.limits is not None and self.ratio - 1 > self.limits.tolerance / 2)
        return shows or not self.noise_class.coarse or self.stages == (Stage.STORED,)

    @property
    def repeated(self) -> bool:
        return Stage.REPEAT in self.stages

    @property
    def moved(self) -> bool:
        """Whether it is slower than in the stored run, although the stored code is as slow today."""
        return self.stored_slower and self.finding is Finding.NOT_WORSE

    def to_json(self) -> dict[str, Any]:
        """Return this row as it is stored; the specs are stored with the tests."""
        fields = asdict(replace(self, key=RowKey(metric=self.key.metric)))
        for name in ("key", "noise_class", "limits", "order"):
            del fields[name]
        limits = asdict(self.limits) if self.limits is not None else {"margin": None, "tolerance": None}
        ends = {end: fields[end] if math.isfinite(fields[end]) else None for end in ("low", "high")}
        named = {"metric": self.key.metric, "control": self.key.control, "open": self.open}
        return named | fields | limits | ends


def rows(estimates: Iterable[Estimates], settings: Settings, tested: Iterable[RowKey] = ()) -> list[Row]:
    """Return a row for each metric of each pair, from the estimates of all stages.

    `tested` has the rows for which the repeats were planned.
    """
    valid = [entry for entry in estimates if not entry.missing]
    stored = [entry for entry in valid if entry.stage is Stage.STORED]
    compared: dict[RowKey, list[Estimates]] = {}
    for entry in valid:
        if entry.stage is not Stage.STORED:
            compared.setdefault(entry.key, []).append(entry)
    found = {row.key: row for row in _stored_rows(stored, settings)}
    noise, levels = noises(compared), frozenset(tested)
    level = settings.false_alarms / REPEATS / max(1, len(levels))
    for key, entries in compared.items():
        if key.exact:
            row = _exact_row(entries)
        else:
            row = _ab_row(entries, noise[key], level if key in levels else 0.0)
        if (before := found.get(key)) is not None:  # an A/B measurement runs one of the tests of a pair
            ratio, slower = before.stored_ratio, before.stored_slower
            row = replace(row, tests=before.tests, stored_ratio=ratio, stored_slower=slower)
        found[key] = row
    return _named(list(found.values()))


def noises(estimates: dict[RowKey, list[Estimates]]) -> dict[RowKey, Noise]:
    """Return the noise between process sets for each row, shrunk towards that of its class.

    The class of a control measurement is that of tests, if there are tests of this class.
    """
    own = {
        key: pooled([logs for entry in entries for logs in _logs(entry)])
        for key, entries in estimates.items()
        if not key.exact
    }
    classes: dict[tuple[str, NoiseClass], list[RowKey]] = {}
    for key in own:
        classes.setdefault((key.metric, estimates[key][0].noise_class), []).append(key)
    found: dict[RowKey, Noise] = {}
    for members in classes.values():
        tests = [key for key in members if key.control is None]
        prior = prior_of([own[key] for key in tests or members])
        found |= {key: moderated(own[key], prior) for key in members}
    return found


def _logs(entry: Estimates) -> tuple[list[float], list[float]]:
    base, candidate = (list(map(math.log, side)) for side in (entry.base, entry.candidate))
    return base, candidate


def _change(entry: Estimates) -> float:
    base, candidate = _logs(entry)
    return mean(candidate) - mean(base)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class _Effect:
    """The log ratio of candidate to base with its standard error; above 0 is worse."""

    change: float
    error: float
    freedom: float

    def upper(self, alpha: float) -> float:
        return self.change + t_quantile(alpha, self.freedom) * self.error

    def lower(self, alpha: float) -> float:
        return self.change - t_quantile(alpha, self.freedom) * self.error

    def ratios(self, alpha: float) -> tuple[float, float, float]:
        """Return the ratio, and the ends of its interval with the level 1 - 2 alpha."""
        return math.exp(self.change), _exp(self.lower(alpha)), _exp(self.upper(alpha))


def _effect(entries: Sequence[Estimates], noise: Noise) -> _Effect:
    """Return the effect of all stages. Differences within a stage count by their numbers of sets."""
    weights = [1 / (1 / len(entry.base) + 1 / len(entry.candidate)) for entry in entries]
    change = sum(map(operator.mul, weights, map(_change, entries))) / sum(weights)
    return _Effect(change, math.sqrt(noise.variance / sum(weights)), noise.freedom)


def _ab_row(entries: Sequence[Estimates], noise: Noise, level: float) -> Row:
    """Return the row of one metric from its A/B measurements. level: below which p is certain."""
    from scipy.special import stdtr  # imported here because it takes 0.2 s

    fresh = [entry for entry in entries if entry.stage is Stage.REPEAT]
    # A control has an interval of 99%, too.
    stage = Stage.REPEAT if fresh or entries[0].key.control else Stage.FIRST
    together, newest = (_effect(of, noise) for of in (entries, fresh or entries))
    margin, tolerance = _logs_of(entries[0].limits)
    order = (newest.change - margin) / newest.error
    p = float(stdtr(noise.freedom, -order))
    certain = bool(fresh) and p < level
    precise = stage is Stage.FIRST and newest.error < PRECISE * tolerance < math.inf
    suspicious = newest.lower(PRECISE_P if precise else SUSPICIOUS_P[stage]) > margin
    return _row(
        entries,
        _means(fresh if certain else entries),
        (newest if certain else together).ratios(CLEAR_P[stage]),
        cleared=together.upper(CLEAR_P[stage]) < tolerance and (bool(fresh) or not suspicious),
        certain=certain,
        suspicious=suspicious,
        order=order,
        p=p,
    )


def _logs_of(limits: Limits | None) -> tuple[float, float]:
    return (0.0, math.inf) if limits is None else (math.log1p(limits.margin), math.log1p(limits.tolerance))


def _means(entries: Sequence[Estimates]) -> tuple[float, float]:
    sides = ([entry.base for entry in entries], [entry.candidate for entry in entries])
    base, candidate = (geometric_mean(chain(*side)) for side in sides)
    return base, candidate


def _row(
    entries: Sequence[Estimates],
    sides: tuple[float, float],
    ratios: tuple[float, float, float],
    *,
    cleared: bool,
    certain: bool = False,
    suspicious: bool,
    **fields: Any,
) -> Row:
    """Return a row. sides: the values of base and candidate. ratios: the ratio, and its interval's ends."""
    ratio, low, high = ratios
    limits = entries[0].limits  # those of the first stage hold
    finding = Finding.WORSE if certain else Finding.NOT_WORSE if cleared else Finding.UNDECIDED
    return Row(
        key=entries[0].key,
        tests=entries[0].tests,
        noise_class=entries[0].noise_class,
        limits=limits,
        base=sides[0],
        candidate=sides[1],
        ratio=ratio,
        low=low,
        high=high,
        finding=finding if limits is not None else Finding.FOR_INFORMATION,
        certain=certain and limits is not None,
        suspicious=suspicious and limits is not None,
        stages=tuple(dict.fromkeys(entry.stage for entry in entries)),
        sets=sum(min(len(entry.base), len(entry.candidate)) for entry in entries),
        steps=sum(entry.steps for entry in entries),
        **fields,
    )


def _exact_row(entries: Sequence[Estimates]) -> Row:
    """Return the row of a metric without noise, such as bytes: any increase that is seen twice is worse."""
    grown = [max(entry.candidate) > max(entry.base) for entry in entries]
    base, candidate = max(entries[-1].base), max(entries[-1].candidate)
    ratio = candidate / base if base else max(1.0, candidate)  # if the base has 0 bytes, divide by one byte
    worse = sum(grown) > 1 and grown[-1]
    return _row(
        entries,
        (base, candidate),
        (ratio, ratio, ratio),
        cleared=not grown[-1],
        certain=worse,
        suspicious=grown[-1],
        order=math.inf if grown[-1] else -math.inf,
        p=0.0 if worse else 1.0,
    )


def _stored_rows(stored: Sequence[Estimates], settings: Settings) -> list[Row]:
    """Return the rows of the comparison with the stored run, in which one run is one observation."""
    changes: dict[tuple[str, NoiseClass], list[float]] = {}
    for entry in stored:
        if entry.tests and not entry.key.exact:
            changes.setdefault((entry.key.metric, entry.noise_class), []).append(_change(entry))
    timed = {entry.key for entry in stored if entry.limits and entry.key.metric == "time" and entry.tests}
    level = settings.false_alarms / max(1, len(timed))
    found = []
    for entry in stored:
        if entry.key.exact:
            found.append(_exact_row([entry]))
        else:
            of_class = changes.get((entry.key.metric, entry.noise_class), [0.0])  # the copy has none
            found.append(_stored_row(entry, of_class, level if entry.key in timed else 0.0))
    return found


def _stored_row(entry: Estimates, changes: Sequence[float], level: float) -> Row:
    """Return the row of one metric of two runs. level: of the test whether it is slower than stored.

    The spread of a class between two runs is at least the usual one, and otherwise follows from the
    median of the squared `changes` in the class. To clear a row, these changes are taken about 0. To
    call a row suspicious or slower, they are taken about their median, so that a slower machine shows.
    """

    def about(centre: float) -> _Effect:
        spread = median((change - centre) ** 2 for change in changes) / HALF_NORMAL
        variance = max(2 * entry.run_spread**2, spread) + entry.round_error**2
        return _Effect(_change(entry), math.sqrt(variance), STORED_FREEDOM)

    about_zero, about_median = about(0.0), about(median(changes))
    margin, tolerance = _logs_of(entry.limits)
    suspicious = about_median.lower(SUSPICIOUS_P[Stage.STORED]) > margin
    return _row(
        [entry],
        _means([entry]),
        about_zero.ratios(CLEAR_P[Stage.STORED]),
        cleared=about_zero.upper(CLEAR_P[Stage.STORED]) < tolerance and not suspicious,
        suspicious=suspicious,
        order=(about_zero.change - margin) / about_zero.error,
        stored_ratio=math.exp(about_zero.change),
        stored_slower=level > 0 and about_median.lower(level) > margin,
    )


def _named(found: list[Row]) -> list[Row]:
    """Return the rows, with further worse rows named if one is certainly worse (Benjamini, Hochberg 1995).

    Of all named rows, at most the fraction `FALSE_NAMES` is expected to be wrong. A row that was not
    repeated is tested by its first measurement. Collective calls are tested apart from steps: slower
    steps say nothing about calls, so they must not make it easier to name one (Efron 2008).
    """
    if not any(row.certain for row in found):
        return found
    from scipy.stats import false_discovery_control  # imported here because it takes 1 s

    tested = [row for row in found if row.judged and row.stages != (Stage.STORED,)]
    named: set[RowKey] = set()
    for of_calls in (True, False):
        group = [row for row in tested if (row.noise_class.kind in CALLS) == of_calls]
        if group:
            adjusted = false_discovery_control([row.p for row in group])
            named |= {row.key for row, p in zip(group, adjusted, strict=True) if p <= FALSE_NAMES}
    return [replace(row, finding=Finding.WORSE) if row.key in named else row for row in found]


# --- what to measure next


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The next measurement: its pairs, the most suspicious one first, and the open rows that it tests.

    `left` is the number of pairs with an open row for which no time is left.
    """

    pairs: tuple[Pair, ...]
    tested: frozenset[RowKey]
    left: int


def next_plan(found: Sequence[Row], seconds: Mapping[Pair, float], time_left: float) -> Plan:
    """Return what to measure next within `time_left` seconds: at least one pair.

    `seconds` has the expected seconds of the measurement of each pair. The first measurement has at
    least one pair whose step can be delayed as a control, and whose tolerance is the smallest. If no
    pair is open, the shortest of these is measured. It serves a row without a pair, such as idle_cpus.
    """
    still = [row for row in found if row.open]
    in_order = sorted(still, key=lambda row: -row.order)
    pairs = list(dict.fromkeys(row.key.pair for row in in_order if row.key.pair is not None))
    timed = {row.key.pair: row.limits for row in found if row.limits and row.key.metric == "time"}
    steps = {pair: of.tolerance for pair, of in timed.items() if pair and not isinstance(pair.base, RunSpec)}
    tight = {pair for pair, tolerance in steps.items() if tolerance == min(steps.values())}
    tight = tight or {pair for pair in timed if pair is not None}
    chosen: list[Pair] = []
    for pair in pairs:
        if not chosen or sum(map(seconds.__getitem__, [*chosen, pair])) <= time_left:
            chosen.append(pair)
    is_first = all(row.stages == (Stage.STORED,) for row in found)
    if tight and (not chosen or (is_first and tight.isdisjoint(chosen))):
        chosen.append(min(tight, key=seconds.__getitem__))
    tested = frozenset(row.key for row in still if row.key.pair is None or row.key.pair in chosen)
    return Plan(pairs=tuple(chosen), tested=tested, left=len(set(pairs) - set(chosen)))


def only_the_machine_changed(found: Sequence[Row]) -> bool:
    """Return whether tests got slower than stored, but no test may have got slower than the stored code.

    An open test that was not measured A/B may have got slower if it changed more than these tests.
    """
    moved = [row.stored_ratio for row in found if row.moved and row.stored_ratio is not None]
    return bool(moved) and not any(
        row.open and (row.stages != (Stage.STORED,) or (row.stored_ratio or math.inf) > max(moved))
        for row in found
    )
