"""This run's measurements beside a baseline's: a change where they are comparable, a hole where they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ddpperf.analysis.statistics import median
from ddpperf.results import Measured

# With one process set a side no finer limit holds: between two runs of identical code an eager all_reduce of 1 KiB took
# 1.47 times as long on H200s and 1.41 times on a shared 2-core machine.
SLOWER_RATIO = 2.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Median seconds of a step, then and now."""

    then_seconds: float
    now_seconds: float

    @property
    def ratio(self) -> float:
        """Now over then: above 1 is slower."""
        return self.now_seconds / self.then_seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """changes: by test id, what could be compared. holes: by test id, why the others could not."""

    baseline: str
    limit: float
    changes: Mapping[str, Change] = field(default_factory=dict)
    holes: Mapping[str, str] = field(default_factory=dict)

    @property
    def slower(self) -> dict[str, Change]:
        return {test: change for test, change in self.changes.items() if change.ratio > self.limit}


def compare(
    now: Mapping[str, Measured],
    then: Mapping[str, Measured],
    *,
    expected: Collection[str],
    baseline: str,
    limit: float,
) -> Comparison:
    """Compare test by test; comparable means equal test id and equal spec.

    expected: the ids of the tests that this run had to compare. baseline: what to call the other run. limit: as in Comparison.
    """
    changes, holes = {}, {}
    for test in sorted(expected):
        if test not in then:
            holes[test] = f"is not in {baseline}"
        elif test not in now:
            holes[test] = f"is in {baseline} but was not measured"
        elif now[test].spec != then[test].spec:
            holes[test] = f"measures another spec than in {baseline}"
        else:
            changes[test] = Change(
                then_seconds=median(then[test].all_step_seconds()), now_seconds=median(now[test].all_step_seconds())
            )
    return Comparison(baseline=baseline, limit=limit, changes=changes, holes=holes)
