"""This run's measurements beside a baseline's: a change where they are comparable, a hole where they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results import Measured

# With one process set a side, how much slower is too slow depends on what bounds a step. Between runs of identical code on
# H200s, GPU-bound cells, whose rounds spread by less than 1 %, stayed within 1.1 % of each other on a machine and 3 % between
# machines; cells bound by the CPU's launches differed by up to 1.93 times.
QUIET_IQR = 0.01
QUIET_LIMIT = 1.1
NOISY_LIMIT = 2.5


@dataclass(frozen=True, kw_only=True)
class Change:
    """Median seconds of a step, then and now; a ratio above `limit` is slower."""

    then_seconds: float
    now_seconds: float
    limit: float

    @property
    def ratio(self) -> float:
        """Now over then: above 1 is slower."""
        return self.now_seconds / self.then_seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """changes: by test id, what could be compared. holes: by test id, why the others could not."""

    baseline: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    holes: Mapping[str, str] = field(default_factory=dict)

    @property
    def slower(self) -> dict[str, Change]:
        return {test: change for test, change in self.changes.items() if change.ratio > change.limit}


def compare(
    now: Mapping[str, Measured],
    then: Mapping[str, Measured],
    *,
    expected: Collection[str],
    baseline: str,
    limit: float | None,
) -> Comparison:
    """Compare test by test; comparable means equal test id and equal spec.

    expected: the ids of the tests that this run had to compare. baseline: what to call the other run. limit: the ratio above
    which a step is slower; None for each test's own, by how much its rounds spread.
    """
    changes, holes = {}, {}
    for test in sorted(expected):
        if test not in then:
            if test in now:
                holes[test] = f"is not in {baseline}"
        elif test not in now:
            holes[test] = f"is in {baseline} but was not measured"
        elif now[test].spec != then[test].spec:
            holes[test] = f"measures another spec than in {baseline}"
        else:
            sides = then[test].all_step_seconds(), now[test].all_step_seconds()
            changes[test] = Change(
                then_seconds=median(sides[0]),
                now_seconds=median(sides[1]),
                limit=limit or (QUIET_LIMIT if all(map(is_quiet, sides)) else NOISY_LIMIT),
            )
    return Comparison(baseline=baseline, changes=changes, holes=holes)


def is_quiet(seconds: Sequence[float]) -> bool:
    """Whether enough rounds agree well enough to see small changes."""
    return len(seconds) >= FEWEST_ROUNDS and relative_iqr(seconds) < QUIET_IQR
