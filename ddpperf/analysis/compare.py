"""This run's measurements beside a baseline's: a change where they are comparable, a hole where they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results import Measured

# With one process set a side, how much slower is too slow depends on what bounds a step. Between runs of identical code on
# H200s, GPU-bound cells, whose rounds spread by less than 1 %, stayed within 1.1 % of each other on a machine and 3 % between
# machines; cells bound by the CPU's launches differed by up to 1.93 times.
QUIET_IQR = 0.01
QUIET_LIMIT = 1.1
NOISY_LIMIT = 2.5

# Above this, the step's time over the GPU's own for it, a step waits for the CPU's launches; unless it is captured, its time
# then moves from run to run, and is for information.
LAUNCH_BOUND = 1.05
CPU_LIMIT = 1.25  # instead, how many times the CPU seconds of a step are too many


@dataclass(frozen=True, kw_only=True)
class Change:
    """Seconds of a step, then and now: its median time, or its CPU seconds; a ratio above `limit` is slower."""

    then_seconds: float
    now_seconds: float
    limit: float
    quantity: Literal["step", "CPU seconds"] = "step"

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

    def failures(self) -> dict[str, str]:
        """By test that is slower, how much."""
        return {
            test: f"is slower: {change.ratio:.2f} times its {change.quantity} in {self.baseline}, limit {change.limit:g}"
            for test, change in self.slower.items()
        }

    def unseen(self) -> list[str]:
        """What could not be compared, a sentence each."""
        return [f"{test} {why}" for test, why in self.holes.items()]

    def passed(self) -> str:
        """What a pass means."""
        return f"none slower than in {self.baseline} by more than its limit"


def compare(
    now: Mapping[str, Measured],
    then: Mapping[str, Measured],
    *,
    expected: Collection[str],
    baseline: str,
    limit: float | None,
) -> Comparison:
    """Compare test by test, times or, of what launches bound then and now, CPU seconds; comparable means equal id and spec.

    expected: the ids of the tests that this run had to compare. baseline: what to call the other run. limit: the ratio of times
    above which a step is slower; None for each test's own, by how much its rounds spread. CPU seconds have `CPU_LIMIT`.
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
        elif _by_cpu_seconds(then[test], now[test]):
            cpu_then, cpu_now = _cpu_seconds(then[test]), _cpu_seconds(now[test])
            if cpu_then is None or cpu_now is None:
                side = baseline if cpu_then is None else "this run"
                holes[test] = f"is bound by launches, and {side} has no CPU seconds of it to compare"
            else:
                changes[test] = Change(then_seconds=cpu_then, now_seconds=cpu_now, limit=CPU_LIMIT, quantity="CPU seconds")
        else:
            sides = then[test].all_step_seconds(), now[test].all_step_seconds()
            changes[test] = Change(
                then_seconds=median(sides[0]),
                now_seconds=median(sides[1]),
                limit=limit or (QUIET_LIMIT if all(map(is_quiet, sides)) else NOISY_LIMIT),
            )
    return Comparison(baseline=baseline, changes=changes, holes=holes)


def _by_cpu_seconds(then: Measured, now: Measured) -> bool:
    """Whether launches bound both, or what is known of it, and no graph replays them: else the times say more."""
    return is_launch_bound(then) and not then.spec.captured and (is_launch_bound(now) or not now.launch_bound())


def is_launch_bound(measured: Measured) -> bool:
    """Whether a step waited for launches in the median set; not so where nothing was counted, as on a CPU."""
    by_set = measured.launch_bound()
    return bool(by_set) and median(by_set.values()) > LAUNCH_BOUND


def _cpu_seconds(measured: Measured) -> float | None:
    """What a step took of the CPU in the median set, of the rank that needed most; None unless that is a positive number."""
    by_set = measured.counter("cpu_seconds")
    seconds = median(by_set.values()) if by_set else 0.0
    return seconds if seconds > 0 else None


def is_quiet(seconds: Sequence[float]) -> bool:
    """Whether enough rounds agree well enough to see small changes."""
    return len(seconds) >= FEWEST_ROUNDS and relative_iqr(seconds) < QUIET_IQR
