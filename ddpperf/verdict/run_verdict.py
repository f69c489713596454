"""The verdict of a test run (PASS, FAIL or NO VERDICT), with its reasons and its exit status.

A missing measurement or comparison never gives a PASS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ddpperf.results import units
from ddpperf.results.outcomes import Outcome, OutcomeKind, Status, Verdict

_EXIT_STATUS = {Status.PASS: 0, Status.FAIL: 1, Status.NO_VERDICT: 125}  # `git bisect run` skips 125
_USAGE_ERROR = 4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a comparison with a stored run, or between base and candidate.

    `worse` says for each test that got worse by how much. `seconds` has the times of base and
    candidate, unrounded, which are equal for tests that share a measurement. `untrusted` lists the
    failed control measurements, after which no finding can be trusted. `undecided` lists what could
    not be compared. `unfit` lists why no later run should be compared with this run. `summary` says
    what a PASS means. All texts are sentences, or sentences without the test's name in front.
    """

    worse: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    untrusted: Sequence[str] = ()
    undecided: Sequence[str] = ()
    unfit: Sequence[str] = ()
    summary: str = ""

    @property
    def regressions(self) -> list[str]:
        """One sentence for each different worsening. Tests that share a measurement share a sentence."""
        tests: dict[tuple[str, object], list[str]] = {}
        for test, how in self.worse.items():
            tests.setdefault((how, self.seconds.get(test, test)), []).append(test)
        return [
            f"{first} {how}" + (f"; the same measurement is that of {', '.join(others)}" if others else "")
            for (how, _), (first, *others) in tests.items()
        ]


def decide(
    outcomes: Mapping[str, Outcome],
    *,
    measured: Collection[str],
    answer: Answer | None,
    problems: Sequence[str] = (),
) -> Verdict:
    """Return PASS, FAIL or NO VERDICT for a test run, with the reasons.

    The first of these that occurs decides: a failed test, a failed control measurement, a test that
    got worse, a missing result. `measured` holds the ids of the tests that stored a sample.
    `answer` is None if nothing was compared. `problems` lists other reasons for no verdict.
    """
    if answer is None:
        answer = Answer(summary="not compared with a baseline: no --benchmark-compare was given")
    failed = _sentences(outcomes, OutcomeKind.FAILED, "failed")
    if failed or (answer.worse and not answer.untrusted):
        return Verdict(status=Status.FAIL, reasons=(*failed, *answer.untrusted, *answer.regressions))
    missing = (
        *answer.untrusted,
        *answer.regressions,
        *problems,
        *_sentences(outcomes, OutcomeKind.BASE_FAILED, "was not measured"),
        *_sentences(outcomes, OutcomeKind.NOT_COLLECTED, "could not be collected"),
        *(f"{test} was not run" for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.NOT_RUN),
        *(
            f"{test} passed without a measurement"
            for test, outcome in outcomes.items()
            if outcome.kind is OutcomeKind.PASSED and test not in measured
        ),
        *([] if measured else ["no test was measured"]),
        *answer.undecided,
    )
    if missing:
        return Verdict(status=Status.NO_VERDICT, reasons=missing)
    skipped = sum(outcome.kind.skipped for outcome in outcomes.values())
    but = f", {skipped} skipped" if skipped else ""
    reason = f"{units.counted(len(measured), 'test')} measured{but}, {answer.summary}"
    return Verdict(status=Status.PASS, reasons=(reason,))


def _sentences(outcomes: Mapping[str, Outcome], kind: OutcomeKind, words: str) -> list[str]:
    return [f"{test} {words}: {outcome.reason}" for test, outcome in outcomes.items() if outcome.kind is kind]


def exit_status(status: Status, *, saved: bool) -> int:
    """Return the exit status of a test run from its verdict.

    The status is that of a usage error if a result file was not written. A FAIL keeps its own exit
    status, so that a full disk hides no regression.
    """
    if not saved and status is not Status.FAIL:
        return _USAGE_ERROR
    return _EXIT_STATUS[status]
