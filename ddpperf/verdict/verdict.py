"""One answer for a whole run: PASS, FAIL or NO VERDICT, with the reasons. What was not looked at is never a PASS."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BASE_FAILED = "base failed"  # of two sides the one that is judged to be good: the other was not measured
CANDIDATE_CANNOT = (
    "the candidate cannot measure it"  # though the base can: how the reason of such a skip begins
)


class Status(enum.StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NO_VERDICT = "NO VERDICT"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test ended: "passed", "failed", "skipped", "not run", "not collected", `BASE_FAILED`; the first line of why."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """reasons: a line each, the tests that failed or were not seen among them."""

    status: Status
    reasons: tuple[str, ...]


class Answer(Protocol):
    """What a comparison, with a stored run or between two sides, says."""

    def failures(self) -> Mapping[str, str]:
        """By test that got worse, how."""

    def untrusted(self) -> list[str]:
        """Why nothing that it says can be trusted, a sentence each: a control that failed."""

    def unseen(self) -> list[str]:
        """What it cannot say, a sentence each."""

    def unfit(self) -> list[str]:
        """Why no later run should be compared with this one, a sentence each."""

    def passed(self) -> str:
        """What it says if there is neither, a sentence's end."""


def decide(
    outcomes: Mapping[str, Outcome],
    *,
    measured: Collection[str],
    answer: Answer | None,
    problems: Sequence[str] = (),
) -> Verdict:
    """The verdict over all tests of a run.

    measured: ids of the tests that stored a sample. answer: None where no comparison was asked for, or none was possible, which
    is then one of the problems: reasons why this run cannot answer. A test that failed outranks all else, then a control that
    did, then what got worse, then what was not seen.
    """
    failed = [
        f"{test} failed: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome == "failed"
    ]
    worse = [f"{test} {how}" for test, how in answer.failures().items()] if answer is not None else []
    untrusted = answer.untrusted() if answer is not None else []
    if failed or (worse and not untrusted):
        return Verdict(status=Status.FAIL, reasons=(*failed, *untrusted, *worse))

    unseen = [*untrusted, *worse, *problems]
    unseen += [
        f"{test} was not measured: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome == BASE_FAILED
    ]
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
    if answer is not None:
        unseen += answer.unseen()
    if unseen:
        return Verdict(status=Status.NO_VERDICT, reasons=tuple(unseen))

    compared = (
        "not compared with a baseline: no --benchmark-compare was given"
        if answer is None
        else answer.passed()
    )
    count = f"{len(measured)} test{'s' if len(measured) != 1 else ''} measured"
    skipped = sum(outcome.outcome == "skipped" for outcome in outcomes.values())
    parts = [count, *([f"{skipped} skipped"] if skipped else []), compared]
    return Verdict(status=Status.PASS, reasons=(", ".join(parts),))
