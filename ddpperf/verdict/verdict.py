"""The verdict of a test run (PASS, FAIL or NO VERDICT), with its reasons and its exit status.

A missing measurement or comparison never gives a PASS.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ddpperf.results import units
from ddpperf.results.outcomes import AGAIN, Outcome, OutcomeKind, Reason, Status, Verdict
from ddpperf.verdict import controls
from ddpperf.verdict.estimates import Control, Estimates, Pair, Stage
from ddpperf.verdict.rows import Finding, Row

_EXIT_STATUS = {Status.PASS: 0, Status.FAIL: 1, Status.NO_VERDICT: 125}  # `git bisect run` skips 125
MOST_UNDECIDED = 0.05  # the largest fraction of undecided pairs in a PASS
WORDS = {"mean_time": "mean time", "peak_memory_bytes": "peak memory"}  # others by their names
# What a verdict says of tests that ended in these ways, and what to do
ENDED = {
    OutcomeKind.FAILED: ("failed", ""),
    OutcomeKind.BASE_FAILED: ("was not measured", "repair the base, or deselect the test"),
    OutcomeKind.NOT_COLLECTED: ("could not be collected", "correct this file"),
    OutcomeKind.NOT_RUN: ("was not run", AGAIN),
    OutcomeKind.PASSED: ("passed without a measurement", "call measure(spec) in this test"),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    regressions: Sequence[str] = ()  # a sentence for each pair that got worse
    worse: Mapping[str, str]  # the same for each test of these pairs
    untrusted: Sequence[Reason] = ()  # why no finding counts
    undecided: Sequence[Reason] = ()  # what may have been missed, or could not be compared
    unfit: Sequence[str] = ()  # why no later run should be compared with this run
    summary: str = ""  # what a PASS means


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a comparison depends on besides its rows."""

    compared_with: str = ""  # the name of the stored run; empty in an A/B run
    missing: Mapping[str, str]  # why a test cannot be judged, by test
    cannot: Sequence[str] = ()  # tests that only the candidate cannot measure
    problems: Sequence[Reason] = ()  # what could not be done
    late: Sequence[Reason] = ()  # what had no time left
    differences: Sequence[str] = ()  # of this environment from that of the stored run
    new: Sequence[str] = ()  # tests that the stored run lacks


def answer_of(found: Sequence[Row], estimates: Sequence[Estimates], context: Context) -> Answer:
    """Return the answer of a comparison from its rows and control measurements."""
    judged = [row for row in found if row.judged]
    by_pair: dict[Pair | None, list[Row]] = {}
    for row in sorted(judged, key=lambda row: (not row.certain, -row.ratio)):
        by_pair.setdefault(row.key.pair, []).append(row)
    regressions: list[str] = []
    worse: dict[str, str] = {}
    for of_pair in by_pair.values():
        slower = [row for row in of_pair if row.finding is Finding.WORSE]
        slower.sort(key=lambda row: row.key.metric != "time")
        if not slower:
            continue
        time = slower[0].ratio if slower[0].key.metric == "time" else 1.0  # the mean changes as the time
        shown = [row for row in slower if row.key.metric != "mean_time" or row.ratio > time**1.5]
        how = "; ".join(map(_change, shown))
        others = ", ".join(slower[0].tests[1:])
        same = f"; other tests with this measurement: {others}" if others else ""
        regressions.append(f"{_who(slower[0])} is worse: {how}{same}")
        worse |= dict.fromkeys(slower[0].tests, f"is worse: {how}")
    looks_worse = [
        f"{_who(row)} looks worse: {_change(row)}" for row in judged if row.open and row.suspicious
    ]
    untrusted = controls.untrusted(found, estimates)
    if regressions and not any(row.key.control is Control.COPY for row in found):
        untrusted.append(
            Reason("the negative control was not measured, so no finding counts", controls.QUIETER)
        )
    missing = f"{AGAIN}; if it happens again, deselect the test"
    if context.compared_with:
        missing = "run all tests of the stored run with its options, or store a new baseline"
    return Answer(
        regressions=regressions,
        worse=worse,
        untrusted=untrusted,
        undecided=[
            *context.problems,
            *_changed_machine(found, context),
            *(Reason(f"{test} {why}", missing) for test, why in context.missing.items()),
            *_undecided(by_pair, context),
            *controls.blind(found),
        ],
        unfit=[*regressions, *looks_worse, *(reason.text for reason in untrusted)],
        summary=_summary(by_pair, context),
    )


def _who(row: Row) -> str:
    return row.tests[0] if row.tests else "the candidate"


def _name(row: Row) -> str:
    return WORDS.get(row.key.metric, row.key.metric)


def _change(row: Row) -> str:
    """Return how the candidate's value of a row differs from the base's."""
    if row.key.metric == "idle_cpus":
        busy = f"its processes keep {row.candidate:.2f} CPU cores busy, those of the base {row.base:.2f}"
        return f"between their rounds {busy}"
    base = "stored one" if row.stages == (Stage.STORED,) else "base's"
    where = ", measured again on new process sets" if row.repeated else ""
    if row.key.exact:
        return f"its {_name(row)} is {row.candidate:.12g}, the {base} {row.base:.12g}{where}"
    interval = f"{row.low:.3f} " + (f"to {row.high:.3f}" if math.isfinite(row.high) else "or more")
    return f"its {_name(row)} is {row.ratio:.3f} times the {base} ({interval}{where})"


def _changed_machine(found: Sequence[Row], context: Context) -> list[Reason]:
    """Return a reason if tests got slower than stored although the stored code is as slow today."""
    moved = sorted((row for row in found if row.moved), key=lambda row: -(row.stored_ratio or 1.0))
    resting = any(row.judged and row.stages == (Stage.STORED,) for row in found)
    copies = [row for row in found if row.key.control is Control.STORED_COPY and not row.low <= 1 <= row.high]
    if moved:
        more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        who, ratio = f"{_who(moved[0])}{more}", moved[0].stored_ratio
        today = ", but the stored code is as slow today"
    elif copies and resting:
        who, ratio, today = "a copy of memory", copies[0].ratio, ""
    else:
        return []
    what = f"{who} takes {ratio:.2f} times as long as in {context.compared_with}{today}"
    differences = "; ".join(context.differences) or "none was found in the stored environments"
    text = f"this machine or its environment changed: {what}; differences: {differences}"
    undo = "undo the differences" if context.differences else "find what else runs on this machine"
    return [Reason(text, f"{undo}, or store a new baseline: python -m pytest perf/ --benchmark-save=NAME")]


def needs_no_repeat(found: Sequence[Row]) -> bool:
    """Return whether the undecided rows allow a PASS, and exclude slow-downs of twice their tolerances."""
    undecided = [row for row in found if row.open]
    return may_pass(found) and all(row.high - 1 < 2 * row.limits.tolerance for row in undecided if row.limits)


def may_pass(found: Sequence[Row]) -> bool:
    """Return whether the undecided rows allow a PASS."""
    pairs, total = _open_pairs(found)
    return not _blocking(found) and len(pairs) <= MOST_UNDECIDED * total


def _blocking(found: Sequence[Row]) -> list[Row]:
    """Return the undecided rows that look worse, or whose change exceeds half of the tolerance."""
    open_rows = [row for row in found if row.open]
    above_half = [row for row in open_rows if row.limits and row.ratio - 1 > row.limits.tolerance / 2]
    return above_half + [row for row in open_rows if row.suspicious]


def _open_pairs(found: Sequence[Row]) -> tuple[list[Pair | None], int]:
    """Return the pairs with an open row, and the number of all pairs that have one or a judged time."""
    pairs = dict.fromkeys(row.key.pair for row in found if row.open)
    timed = {row.key.pair for row in found if row.judged and row.key.metric == "time"}
    return list(pairs), len(timed | pairs.keys())


def _undecided(by_pair: Mapping[Pair | None, Sequence[Row]], context: Context) -> list[Reason]:
    """Return why the undecided rows do not allow a PASS.

    An undecided row that looks worse, or whose estimate exceeds half of its tolerance, blocks a PASS.
    So do undecided rows in more than 5% of the pairs, and a test that only the candidate cannot measure.
    """
    found = [row for rows in by_pair.values() for row in rows]
    open_rows, blocking = [row for row in found if row.open], _blocking(found)
    pairs, total = _open_pairs(found)
    reasons = []
    if not by_pair.keys() - {None}:
        reasons.append(Reason("no test has a metric that can be judged", "add a test of a training step"))
    if context.cannot:
        count = units.counted(len(context.cannot), "test")
        cannot = f"the candidate cannot measure {count}, such as {context.cannot[0]}"
        reasons.append(Reason(cannot, "deselect these tests"))
    if not may_pass(found):
        reasons += context.late
        if open_rows:
            worst = max(blocking or open_rows, key=lambda row: (math.isfinite(row.high), row.order))
            are = "is" if len(pairs) == 1 else "are"
            count = f"{len(pairs)} of {total} measurements {are} undecided"
            why = "but this is too uncertain for a FAIL"
            if worst.limits and not worst.suspicious:
                why = f"so a slow-down of {worst.limits.tolerance:.0%} is neither found nor excluded"
            elif not worst.repeated:
                why = "but it was not measured again on new process sets"
            text = f"{count}, such as {_who(worst)}: {_change(worst)}, {why}"
            reasons.append(Reason(text, controls.QUIETER))
    return reasons


def _summary(by_pair: Mapping[Pair | None, Sequence[Row]], context: Context) -> str:
    """Return what a PASS says: which slow-downs the rows exclude, in how many timed steps."""
    by_class: dict[tuple[str, str], list[Sequence[Row]]] = {}
    for rows in by_pair.values():
        times = [row for row in rows if row.key.metric in ("time", "mean_time")]
        finite = all(math.isfinite(row.high) for row in times)  # others are named as undecided
        tolerances = {row.key.metric: f"{row.limits.tolerance:.0%}" for row in times if row.limits}
        if finite and (tolerance := tolerances.get("time")):
            if (of_mean := tolerances.get("mean_time", tolerance)) != tolerance:
                tolerance += f", mean time {of_mean}"
            by_class.setdefault((times[0].noise_class.described, tolerance), []).append(times)
    against = f"the code of {context.compared_with}" if context.compared_with else "the base"
    text = f"nothing got slower than {against}"
    if by_class:
        text += ": " + "; ".join(_excluded(*of, by_class[of]) for of in sorted(by_class))
    judged = [row for rows in by_pair.values() for row in rows if row.judged and row.tests]
    undecided = [row for row in judged if row.finding is Finding.UNDECIDED]
    if undecided:
        text += f"; undecided: {', '.join(f'the {_name(row)} of {row.tests[0]}' for row in undecided)}"
    if context.new:
        text += f"; {units.counted(len(context.new), 'test')} new, such as {context.new[0]}"
    return text


def _excluded(described: str, tolerance: str, pairs: Sequence[Sequence[Row]]) -> str:
    """Return the slow-downs that half, 95% and all of some pairs exclude. Each is the end of a row, or 0."""
    ends = sorted(max(0.0, *(row.high - 1 for row in rows)) for rows in pairs)
    ends = [math.ceil(end * 1000) / 1000 for end in ends]  # a smaller number was not excluded
    half, most = (ends[math.ceil(part * len(ends)) - 1] for part in (0.5, 1 - MOST_UNDECIDED))
    steps = min(row.steps for rows in pairs for row in rows)
    head = f"{units.counted(len(ends), 'measurement')} {described} (tolerance {tolerance})"
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
    ended: dict[OutcomeKind, list[Reason]] = {kind: [] for kind in ENDED}
    for test, outcome in outcomes.items():
        if outcome.kind in ENDED and not (outcome.kind is OutcomeKind.PASSED and test in measured):
            what, advice = ENDED[outcome.kind]
            why = f": {outcome.reason}" if outcome.reason else ""
            ended[outcome.kind].append(Reason(f"{test} {what}{why}", advice))
    failed = [reason.text for reason in ended[OutcomeKind.FAILED]]
    untrusted = [reason.text for reason in answer.untrusted]
    if failed or (answer.regressions and not untrusted):
        return Verdict(status=Status.FAIL, reasons=(*failed, *untrusted, *answer.regressions))
    missing = [
        *answer.untrusted,
        *map(Reason, answer.regressions),
        *problems,
        *chain(*ended.values()),
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


def exit_status(status: Status, *, saved: bool) -> int:
    """Return the exit status of a test run from its verdict.

    It is 4, pytest's usage error, if a result file was not written. A FAIL keeps its own exit status,
    so that a full disk hides no regression.
    """
    return _EXIT_STATUS[status] if saved or status is Status.FAIL else 4
