"""The verdict of a test run (PASS, FAIL or NO VERDICT), with its reasons and its exit status.

A missing measurement or comparison never gives a PASS.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.results import units
from ddpperf.results.outcomes import Outcome, OutcomeKind, Reason, Status, Verdict
from ddpperf.verdict import controls
from ddpperf.verdict.estimates import Control, Estimates, Pair, Stage
from ddpperf.verdict.rows import Finding, Row

_EXIT_STATUS = {Status.PASS: 0, Status.FAIL: 1, Status.NO_VERDICT: 125}  # `git bisect run` skips 125
_USAGE_ERROR = 4
MOST_UNDECIDED = 0.05  # the largest fraction of undecided pairs in a PASS
TIMES = ("time", "mean_time")
WORDS = {"mean_time": "mean time", "peak_memory_bytes": "peak memory"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a comparison.

    `regressions` has a sentence for each pair that got worse, and `worse` says it of each of its
    tests. `suspected` has a sentence for each row that looks worse, but not certainly. `untrusted` says
    why no finding counts. `undecided` says what may have been missed, or could not be compared.
    `summary` says what a PASS means.
    """

    regressions: Sequence[str] = ()
    worse: Mapping[str, str]
    suspected: Sequence[str] = ()
    untrusted: Sequence[Reason] = ()
    undecided: Sequence[Reason] = ()
    summary: str = ""

    @property
    def unfit(self) -> list[str]:
        """Why no later run should be compared with this run."""
        return [*self.regressions, *self.suspected, *(reason.text for reason in self.untrusted)]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a comparison depends on besides its rows.

    `compared_with` is the name of the stored run, or "" in an A/B run. `missing` says for each test why
    it cannot be judged, and `cannot` lists the tests that only the candidate cannot measure.
    `problems` says what could not be done, and `late` what had no time left. `differences` lists how
    this environment differs from that of the stored run.
    """

    compared_with: str = ""
    missing: Mapping[str, str]
    cannot: Sequence[str] = ()
    problems: Sequence[Reason] = ()
    late: Sequence[Reason] = ()
    differences: Sequence[str] = ()
    new: Sequence[str] = ()


def answer_of(found: Sequence[Row], estimates: Sequence[Estimates], context: Context) -> Answer:
    """Return the answer of a comparison from its rows and control measurements."""
    judged = [row for row in found if row.judged]
    by_pair: dict[Pair | None, list[Row]] = {}
    for row in sorted(judged, key=lambda row: (not row.certain, -row.ratio)):
        by_pair.setdefault(row.key.pair, []).append(row)
    regressions: list[str] = []
    worse: dict[str, str] = {}
    for of_pair in by_pair.values():
        if slower := _shown([row for row in of_pair if row.finding is Finding.WORSE]):
            how = "; ".join(map(_change, slower))
            first, *others = slower[0].tests or ("the candidate",)
            same = f"; the same measurement is that of {', '.join(others)}" if others else ""
            regressions.append(f"{first} is worse: {how}{same}")
            worse |= dict.fromkeys(slower[0].tests, f"is worse: {how}")
    missing = "run the same command again"
    if context.compared_with:
        missing = "run all tests of the stored run, or store a new baseline without the missing ones"
    return Answer(
        regressions=regressions,
        worse=worse,
        suspected=[
            f"{_who(row)} looks worse: {_change(row)}" for row in judged if row.open and row.suspicious
        ],
        untrusted=controls.untrusted(found, estimates),
        undecided=[
            *context.problems,
            *_changed_machine(found, context),
            *(Reason(f"{test} {why}", missing) for test, why in context.missing.items()),
            *_undecided(by_pair, context),
            *controls.blind(found),
        ],
        summary=_summary(by_pair, context),
    )


def _shown(worse: Sequence[Row]) -> list[Row]:
    """Return the worse rows of a pair, the time first, without a mean time that changed as the time."""
    in_order = sorted(worse, key=lambda row: row.key.metric != "time")
    time = next((row for row in in_order if row.key.metric == "time"), None)
    usual = 0.0 if time is None else 1.5 * math.log(time.ratio)
    return [row for row in in_order if row.key.metric != "mean_time" or math.log(row.ratio) > usual]


def _change(row: Row) -> str:
    if row.key.metric == "idle_cpus":
        return (
            f"between their rounds its processes keep {row.candidate:.2f} CPU cores busy, those of the base "
            f"{row.base:.2f}"
        )
    where = ", measured again on new process sets" if row.repeated else ""
    return f"its {_name(row)} is {row.ratio:.3f} times the {_base(row)} ({_interval(row)}{where})"


def _name(row: Row) -> str:
    return WORDS.get(row.key.metric, row.key.metric)


def _interval(row: Row) -> str:
    return f"{row.low:.3f} to {row.high:.3f}"


def _changed_machine(found: Sequence[Row], context: Context) -> list[Reason]:
    """Return a reason if tests got slower than stored although the stored code is as slow today."""
    moved = [row for row in found if row.moved]
    resting = any(row.judged and row.stages == (Stage.STORED,) for row in found)
    copies = [
        row
        for row in found
        if row.key.control is Control.STORED_COPY and resting and not row.low <= 1 <= row.high
    ]
    if not moved and not copies:
        return []
    if moved:
        most = max(moved, key=lambda row: row.stored_ratio or 1.0)
        more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        what = (
            f"{most.tests[0]}{more} takes {most.stored_ratio:.2f} times as long as in "
            f"{context.compared_with}, but the stored code takes as long today"
        )
    else:
        what = f"a copy of memory takes {copies[0].ratio:.2f} times as long as in {context.compared_with}"
    environments = (
        "; ".join(context.differences) or "none was found in what is stored of the two environments"
    )
    undo = "undo the differences" if context.differences else "find what else runs on this machine"
    return [
        Reason(
            f"this machine or its environment changed: {what}; differences: {environments}",
            f"{undo}, or store a new baseline: python -m pytest perf/ --benchmark-save=NAME",
        )
    ]


def _undecided(by_pair: Mapping[Pair | None, Sequence[Row]], context: Context) -> list[Reason]:
    """Return why the undecided rows do not allow a PASS.

    An undecided row that looks slower, or whose estimate exceeds half of its tolerance, blocks a PASS.
    So do undecided rows in more than 5% of the pairs.
    """
    open_rows = [row for rows in by_pair.values() for row in rows if row.open]
    looks_slower = [row for row in open_rows if row.suspicious or _exceeds_half(row)]
    pairs = dict.fromkeys(row.key.pair for row in open_rows)
    total = len(by_pair) + len(context.cannot)
    reasons = []
    if not by_pair.keys() - {None}:
        reasons.append(Reason("no test has a metric that can be judged", "measure tests that are judged"))
    if looks_slower or len(pairs) + len(context.cannot) > MOST_UNDECIDED * total:
        reasons += context.late
        if open_rows:
            worst = max(looks_slower or open_rows, key=lambda row: (math.isfinite(row.high), row.order))
            count = f"{len(pairs)} of {total} measurements {'is' if len(pairs) == 1 else 'are'} undecided"
            text = f"{count}, such as {_who(worst)}: {_change(worst)}, {_why_undecided(worst)}"
            reasons.append(Reason(text, controls.QUIETER))
        if context.cannot:
            cannot = f"{len(context.cannot)} of {total} tests cannot be measured by the candidate"
            reasons.append(Reason(f"{cannot}, such as {context.cannot[0]}", "deselect these tests"))
    return reasons


def _why_undecided(row: Row) -> str:
    assert row.limits is not None
    if not row.suspicious:
        return f"so a slow-down of {row.limits.tolerance:.0%} is neither found nor excluded"
    if not row.repeated:
        return "but it was not measured again on new process sets"
    return "which is not certain enough for a FAIL"


def _exceeds_half(row: Row) -> bool:
    return row.limits is not None and row.ratio - 1 > row.limits.tolerance / 2


def _who(row: Row) -> str:
    return row.tests[0] if row.tests else "the candidate"


def _base(row: Row) -> str:
    return "stored one" if row.stages == (Stage.STORED,) else "base's"


def _summary(by_pair: Mapping[Pair | None, Sequence[Row]], context: Context) -> str:
    """Return what a PASS says: which slow-downs the rows exclude, in how many timed steps."""
    by_class: dict[tuple[str, float], list[Sequence[Row]]] = {}
    for rows in by_pair.values():
        times = [row for row in rows if row.key.metric in TIMES]
        if not all(math.isfinite(row.high) for row in times):
            continue  # it excludes nothing, and is named as undecided
        if timed := next((row for row in times if row.limits is not None and row.key.metric == "time"), None):
            assert timed.limits is not None
            by_class.setdefault((timed.noise_class.described, timed.limits.tolerance), []).append(times)
    against = f"the code of {context.compared_with}" if context.compared_with else "the base"
    text = f"nothing got slower than {against}"
    parts = [
        _excluded(described, tolerance, times) for (described, tolerance), times in sorted(by_class.items())
    ]
    text = ": ".join([text, "; ".join(parts)]) if parts else text
    undecided = [row.tests[0] for rows in by_pair.values() for row in rows if row.open and row.tests]
    if names := list(dict.fromkeys(undecided)):
        text += f"; undecided: {', '.join(names)}"
    if context.new:
        text += f"; {units.counted(len(context.new), 'test')} new, such as {context.new[0]}"
    return text


def _excluded(described: str, tolerance: float, pairs: Sequence[Sequence[Row]]) -> str:
    """Return the slow-downs that half, 95% and all of some pairs exclude. Each is the end of a row, or 0."""
    ends = sorted(max(0.0, *(row.high - 1 for row in rows)) for rows in pairs)
    half, most = (ends[math.ceil(part * len(ends)) - 1] for part in (0.5, 1 - MOST_UNDECIDED))
    steps = min(row.steps for rows in pairs for row in rows)
    head = f"{units.counted(len(ends), 'measurement')} {described} (tolerance {tolerance:.0%})"
    least = f"in at least {units.counted(steps, 'timed step')} per side"
    if len(ends) == 1:
        return f"{head} excludes a slow-down of {ends[0]:.1%}, {least}"
    excluded = f"exclude a slow-down of {half:.1%}, 95% of them {most:.1%}, all {ends[-1]:.1%}"
    return f"half of {head} {excluded}, {least}"


# --- of the whole run


def decide(
    outcomes: Mapping[str, Outcome],
    *,
    measured: Collection[str],
    answer: Answer | None,
    problems: Sequence[Reason] = (),
) -> Verdict:
    """Return PASS, FAIL or NO VERDICT for a test run, with the reasons.

    The first of these that occurs decides: a failed test, a failed control measurement, a test that
    got worse, a missing result. `measured` holds the ids of the tests that stored a sample.
    `answer` is None if nothing was compared. `problems` lists other reasons for no verdict.
    """
    if answer is None:
        answer = Answer(worse={}, summary="not compared with a baseline: no --benchmark-compare was given")
    failed = _outcomes(outcomes, OutcomeKind.FAILED, "failed")
    untrusted = [reason.text for reason in answer.untrusted]
    if failed or (answer.regressions and not untrusted):
        reasons = (*(reason.text for reason in failed), *untrusted, *answer.regressions)
        return Verdict(status=Status.FAIL, reasons=reasons)
    missing = [
        *answer.untrusted,
        *map(Reason, answer.regressions),
        *problems,
        *_outcomes(
            outcomes, OutcomeKind.BASE_FAILED, "was not measured", "repair the base, or deselect the test"
        ),
        *_outcomes(outcomes, OutcomeKind.NOT_COLLECTED, "could not be collected", "correct this file"),
        *_outcomes(outcomes, OutcomeKind.NOT_RUN, "was not run", "run the same command again"),
        *(
            Reason(f"{test} passed without a measurement", "call measure(spec) in this test")
            for test, outcome in outcomes.items()
            if outcome.kind is OutcomeKind.PASSED and test not in measured
        ),
        *([] if measured else [Reason("no test was measured", "select a test that can run on this machine")]),
        *answer.undecided,
    ]
    if missing:
        advice = next((reason.advice for reason in missing if reason.advice), "")
        return Verdict(
            status=Status.NO_VERDICT, reasons=tuple(reason.text for reason in missing), advice=advice
        )
    skipped = sum(outcome.kind.skipped for outcome in outcomes.values())
    but = f", {skipped} skipped" if skipped else ""
    reason = f"{units.counted(len(measured), 'test')} measured{but}, {answer.summary}"
    return Verdict(status=Status.PASS, reasons=(reason,))


def _outcomes(
    outcomes: Mapping[str, Outcome], kind: OutcomeKind, words: str, advice: str = ""
) -> list[Reason]:
    return [
        Reason(f"{test} {words}{f': {outcome.reason}' if outcome.reason else ''}", advice)
        for test, outcome in outcomes.items()
        if outcome.kind is kind
    ]


def exit_status(status: Status, *, saved: bool) -> int:
    """Return the exit status of a test run from its verdict.

    The status is that of a usage error if a result file was not written. A FAIL keeps its own exit
    status, so that a full disk hides no regression.
    """
    if not saved and status is not Status.FAIL:
        return _USAGE_ERROR
    return _EXIT_STATUS[status]
