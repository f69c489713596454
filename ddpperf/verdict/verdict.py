"""One answer for a whole run: PASS, FAIL or NO VERDICT, with the reasons. What was not looked at is never a PASS."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status, Verdict


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
        if outcome.kind is OutcomeKind.FAILED
    ]
    worse = [f"{test} {how}" for test, how in answer.failures().items()] if answer is not None else []
    untrusted = answer.untrusted() if answer is not None else []
    if failed or (worse and not untrusted):
        return Verdict(status=Status.FAIL, reasons=(*failed, *untrusted, *worse))

    unseen = [*untrusted, *worse, *problems]
    unseen += [
        f"{test} was not measured: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.BASE_FAILED
    ]
    unseen += [
        f"{test} could not be collected: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.NOT_COLLECTED
    ]
    unseen += [
        f"{test} was not run" for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.NOT_RUN
    ]
    unseen += [
        f"{test} passed without a measurement"
        for test, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.PASSED and test not in measured
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
    skipped = sum(outcome.kind.skipped for outcome in outcomes.values())
    parts = [count, *([f"{skipped} skipped"] if skipped else []), compared]
    return Verdict(status=Status.PASS, reasons=(", ".join(parts),))
