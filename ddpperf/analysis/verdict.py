"""One answer for a whole run: PASS, FAIL or NO VERDICT, with the reasons. What was not looked at is never a PASS."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.analysis.compare import Comparison


class Status(enum.StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NO_VERDICT = "NO VERDICT"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test ended: "passed", "failed", "skipped", "not run" or "not collected", and the first line of why."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """reasons: a line each, the tests that failed or were not seen among them."""

    status: Status
    reasons: tuple[str, ...]


def decide(
    outcomes: Mapping[str, Outcome],
    *,
    measured: Collection[str],
    comparison: Comparison | None,
    problems: Sequence[str] = (),
) -> Verdict:
    """The verdict over all tests of a run.

    measured: ids of the tests that stored a sample. comparison: None where none was asked for, or none was possible, which
    is then one of the problems: reasons why this run cannot answer. FAIL outranks NO VERDICT.
    """
    failed = [f"{test} failed: {outcome.reason}" for test, outcome in outcomes.items() if outcome.outcome == "failed"]
    if comparison is not None:
        failed += [
            f"{test} is slower: {change.ratio:.2f} times its {change.quantity} in {comparison.baseline}, limit {change.limit:g}"
            for test, change in comparison.slower.items()
        ]
    if failed:
        return Verdict(status=Status.FAIL, reasons=tuple(failed))

    unseen = list(problems)
    unseen += [
        f"{test} could not be collected: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome == "not collected"
    ]
    unseen += [f"{test} was not run" for test, outcome in outcomes.items() if outcome.outcome == "not run"]
    unseen += [
        f"{test} passed without a measurement"
        for test, outcome in outcomes.items()
        if outcome.outcome == "passed" and test not in measured
    ]
    if not measured:
        unseen.append("no test was measured")
    if comparison is not None:
        unseen += [f"{test} {why}" for test, why in comparison.holes.items()]
    if unseen:
        return Verdict(status=Status.NO_VERDICT, reasons=tuple(unseen))

    if comparison is None:
        compared = "not compared with a baseline: no --benchmark-compare was given"
    else:
        compared = f"none slower than in {comparison.baseline} by more than its limit"
    count = f"{len(measured)} test{'s' if len(measured) != 1 else ''} measured"
    skipped = sum(outcome.outcome == "skipped" for outcome in outcomes.values())
    parts = [count, *([f"{skipped} skipped"] if skipped else []), compared]
    return Verdict(status=Status.PASS, reasons=(", ".join(parts),))
