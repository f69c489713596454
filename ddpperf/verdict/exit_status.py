"""The verdict of a run: PASS, FAIL or NO VERDICT, with the reasons and the exit status.

What was not measured, or not compared, is never a PASS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status, Verdict

_EXIT_STATUS = {Status.PASS: 0, Status.FAIL: 1, Status.NO_VERDICT: 125}  # `git bisect run` skips 125
_USAGE_ERROR = 4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a comparison, with a stored run or between base and candidate.

    worse: how each test that got worse did. untrusted: the failed controls, after which nothing
    else can be trusted. undecided: what could not be compared. unfit: why no later run should be
    compared with this one. summary: what a PASS means. All are sentences, or the ends of sentences.
    """

    worse: Mapping[str, str] = field(default_factory=dict)
    untrusted: Sequence[str] = ()
    undecided: Sequence[str] = ()
    unfit: Sequence[str] = ()
    summary: str = ""

    @property
    def regressions(self) -> list[str]:
        """One sentence for each test that got worse."""
        return [f"{test} {how}" for test, how in self.worse.items()]


def decide(
    outcomes: Mapping[str, Outcome],
    *,
    measured: Collection[str],
    answer: Answer | None,
    problems: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on all tests of a run.

    The order of precedence: a failed test, a failed control, a test that got worse, anything
    missing. measured: ids of the tests that stored a sample. answer: None if nothing was compared.
    problems: other reasons why this run cannot answer.
    """
    failed = _sentences(outcomes, OutcomeKind.FAILED, "failed")
    worse = answer.regressions if answer is not None else []
    untrusted = list(answer.untrusted) if answer is not None else []
    if failed or (worse and not untrusted):
        return Verdict(status=Status.FAIL, reasons=(*failed, *untrusted, *worse))

    unmeasured = [
        f"{test} passed without a measurement"
        for test, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.PASSED and test not in measured
    ]
    missing = [
        *untrusted,
        *worse,
        *problems,
        *_sentences(outcomes, OutcomeKind.BASE_FAILED, "was not measured"),
        *_sentences(outcomes, OutcomeKind.NOT_COLLECTED, "could not be collected"),
        *(f"{test} was not run" for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.NOT_RUN),
        *unmeasured,
        *([] if measured else ["no test was measured"]),
        *(answer.undecided if answer is not None else ()),
    ]
    if missing:
        return Verdict(status=Status.NO_VERDICT, reasons=tuple(missing))

    count = f"{len(measured)} test{'s' if len(measured) != 1 else ''} measured"
    skipped = sum(outcome.kind.skipped for outcome in outcomes.values())
    compared = "not compared with a baseline: no --benchmark-compare was given"
    parts = [
        count,
        *([f"{skipped} skipped"] if skipped else []),
        compared if answer is None else answer.summary,
    ]
    return Verdict(status=Status.PASS, reasons=(", ".join(parts),))


def _sentences(outcomes: Mapping[str, Outcome], kind: OutcomeKind, words: str) -> list[str]:
    return [f"{test} {words}: {outcome.reason}" for test, outcome in outcomes.items() if outcome.kind is kind]


def exit_status(status: Status, *, saved: bool) -> int:
    """Return the exit status of a run: its verdict's, or a usage error if a file is unwritten.

    A FAIL stays a FAIL, so that a full disk hides no regression.
    """
    if not saved and status is not Status.FAIL:
        return _USAGE_ERROR
    return _EXIT_STATUS[status]
