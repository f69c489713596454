"""What a decision between two sides means for the run: what got worse, what was not seen, and what would have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpperf.verdict.ab import Row
from ddpperf.verdict.stored_run import Comparison
from ddpperf.verdict.two_stage_test import MOST_SETS, Finding

MOST_UNDECIDED = 0.05  # of the tests, for a PASS
CONTROLS = (
    ("negative", (Finding.UNCHANGED, Finding.UNDECIDED), "what no change can touch"),
    ("positive", (Finding.SUSPECT, Finding.WORSE), "a slow-down that was put in"),
)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """rows: what was found. holes: by test, why it cannot be judged. problems: why the run cannot be. unmeasured: the tests
    that the candidate cannot measure. sets_option: what says how many sets a side measure."""

    rows: Sequence[Row]
    missing: Mapping[str, str]
    problems: Sequence[str] = ()
    unmeasured: Sequence[str] = ()
    sets_option: str = "--replicates"

    def failures(self) -> dict[str, str]:
        """By test that got worse, what of it did."""
        worse: dict[str, list[str]] = {}
        for row in self.rows:
            if row.gated and row.finding is Finding.WORSE:
                seen = f"({row.low:.3f} to {row.high:.3f}{', on fresh process sets' if row.look > 1 else ''})"
                worse.setdefault(row.test, []).append(
                    f"its {row.metric} is {row.ratio:.3f} times the base's {seen}"
                )
        return {test: f"is worse: {'; '.join(parts)}" for test, parts in worse.items()}

    def unseen(self) -> list[str]:
        """What was not looked at, or not well enough, a sentence each."""
        missing = [f"{test} {why}" for test, why in self.missing.items()]
        return [*self.problems, *missing, *self._missing_controls(), *self._undecided()]

    def unfit(self) -> list[str]:
        """Why no later run should be compared with this one: nothing may be worse, or was looked at too little."""
        return [
            *(f"{test} {how}" for test, how in self.failures().items()),
            *self.untrusted(),
            *self.unseen(),
        ]

    def passed(self) -> str:
        """What a pass means."""
        reach = [row.detectable for row in self._primaries()]
        return f"nothing worse than the base: half of the tests would show {median(reach):.1%}, all of them {max(reach):.1%}"

    def _primaries(self) -> list[Row]:
        return [row for row in self.rows if row.primary and row.gated]

    def untrusted(self) -> list[str]:
        """What the decision was tried with, and did not find, or should not have."""
        rows: dict[str | None, Row] = {row.control: row for row in self.rows}
        return [
            f"the {control} control failed: {what} was found {row.finding}, at {row.ratio:.3f} times "
            f"({row.low:.3f} to {row.high:.3f})"
            for control, right, what in CONTROLS
            if (row := rows.get(control)) is not None and row.finding not in right
        ]

    def _missing_controls(self) -> list[str]:
        measured = {row.control for row in self.rows}
        missing = [
            f"the {control} control was not measured" for control, _, _ in CONTROLS if control not in measured
        ]
        blind = [
            row
            for row in self.rows
            if row.control == "negative" and math.log(row.high / row.ratio) > row.tolerance
        ]
        return missing + [
            f"the negative control shows too little: {row.low:.3f} to {row.high:.3f} times" for row in blind
        ]

    def _undecided(self) -> list[str]:
        primaries = self._primaries()
        undecided = [row for row in primaries if row.undecided]
        of = len(primaries) + len(self.unmeasured)
        if primaries and len(undecided) + len(self.unmeasured) <= MOST_UNDECIDED * of:
            return []
        sentences = [] if primaries else ["no test has a metric that can be judged"]
        if undecided:
            needed = [row.sets for row in undecided]
            enough = (
                f"{self.sets_option} {max(sets for sets in needed if sets)} would do" if all(needed) else ""
            )
            advice = enough or f"no number of sets up to {MOST_SETS} would do"
            sentences.append(
                f"{len(undecided)} of {of} tests are undecided, as {undecided[0].test} is; {advice}"
            )
        if self.unmeasured:
            how_many = f"{len(self.unmeasured)} of {of} tests"
            sentences.append(
                f"{how_many} cannot be measured by the candidate, as {self.unmeasured[0]}; deselect them"
            )
        return sentences


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A comparison with a stored run whose suspects were then measured beside that run's own code, which alone decides."""

    comparison: Comparison
    judgement: Judgement

    def failures(self) -> dict[str, str]:
        """By test that got worse, what of it did."""
        return self.judgement.failures()

    def untrusted(self) -> list[str]:
        """What says that either cannot be trusted."""
        return [*self.comparison.untrusted(), *self.judgement.untrusted()]

    def unseen(self) -> list[str]:
        """What was not compared, or not judged well enough, a sentence each."""
        return [*self.comparison.unseen(), *self.judgement.unseen()]

    def unfit(self) -> list[str]:
        """Why no later run should be compared with this one."""
        return [*self.comparison.untrusted(), *self.judgement.unfit()]

    def passed(self) -> str:
        """What a pass means."""
        tests = len({row.test for row in self.judgement.rows if row.control is None})
        suspects = "1 suspect was" if tests == 1 else f"{tests} suspects were"
        return f"compared with {self.comparison.baseline}: {suspects} measured beside its code, and none is worse"
