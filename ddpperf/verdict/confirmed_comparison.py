"""The answer of a comparison with a stored run, from its screening and its confirmation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ddpperf.results import units
from ddpperf.verdict.ab import MOST_UNDECIDED, Decision, Row, control_problems, times, worse_tests
from ddpperf.verdict.run_verdict import Answer
from ddpperf.verdict.stored_run_comparison import Change, Comparison, Controls


def answer_of(
    comparison: Comparison,
    decision: Decision | None,
    *,
    problems: Sequence[str] = (),
    unconfirmed: str = "",
    no_stored_code: str = "",
    differences: Sequence[str] = (),
) -> Answer:
    """Return the answer of a comparison with a stored run: which tests got worse or are undecided.

    A test is worse if the A/B run found it worse. If a test is slower than in the stored run, but
    the stored run's code is as slow in the A/B run, the machine or its environment changed. If the
    stored run's code cannot run, a test is worse if it is slower than in the stored run.

    `decision` is the result of the A/B run, if there was one. `problems` says what the A/B run
    could not do. `unconfirmed` says why not every test was compared with the stored run's code,
    and `no_stored_code` why none could be. `differences` lists how this environment differs from
    the stored run's.
    """
    name, rows = comparison.baseline, _rows(decision)
    missing = {**comparison.missing, **(decision.missing if decision is not None else {})}
    worse, seconds = _worse(comparison, decision, stored_code=not no_stored_code)
    untrusted, blind = _control_problems(comparison.controls, decision)
    slower = {} if no_stored_code else comparison.looks_slower
    open_tests = {
        test: change for test, change in slower.items() if test not in worse and test not in missing
    }
    moved, undecided = _not_worse(open_tests, rows, name, unconfirmed or "its A/B measurement is missing")
    if decision is not None:
        moved = comparison.controls.untrusted() + moved
    shown = _shown(comparison, rows, stored_code=not no_stored_code)
    answer = Answer(
        worse=worse,
        seconds=seconds,
        untrusted=untrusted,
        undecided=[
            *problems,
            *_changed_machine(moved, differences),
            *undecided,
            *blind,
            *(f"{test} {why}" for test, why in missing.items()),
            *_blind(comparison, shown, no_stored_code or unconfirmed),
        ],
        summary=_summary(comparison, shown, decision),
    )
    return replace(answer, unfit=[*answer.regressions, *answer.untrusted])


def _worse(
    comparison: Comparison, decision: Decision | None, *, stored_code: bool
) -> tuple[dict[str, str], dict[str, tuple[float, float]]]:
    """Return a phrase for each worse test, the largest change first, and the tests' times before and now.

    stored_code: whether the stored run's code can run. Without it, the comparison alone decides.
    """
    if decision is not None:
        return worse_tests(decision.rows), times(decision.rows)
    slower = {} if stored_code else comparison.slower
    in_order = sorted(slower, key=lambda test: -slower[test].ratio)
    seconds = {test: (change.then_seconds, change.now_seconds) for test, change in slower.items()}
    return {test: _slower(slower[test], comparison.baseline) for test in in_order}, seconds


def _control_problems(controls: Controls, decision: Decision | None) -> tuple[list[str], list[str]]:
    """Return the reasons why no finding counts, and the reasons why a slow-down may have been missed."""
    if decision is None:
        return controls.untrusted(), [*controls.missing, *controls.blind()]
    # The positive control of the confirmation takes turns with the base, that of the screening
    # follows later. The latter counts if the confirmation has no training step to delay.
    untrusted, blind = control_problems(decision.rows, positive_needed=False)
    if not any(row.control == "positive" for row in decision.rows):
        lacking = isinstance(controls.positive, str) and controls.positive
        blind += [lacking] if lacking else controls.blind()
    return untrusted, blind


def _rows(decision: Decision | None) -> dict[str, Row]:
    """Return the finding of the A/B run for the primary metric of each test."""
    rows = decision.rows if decision is not None else ()
    return {row.test: row for row in rows if row.primary and row.gated and row.control is None}


def _not_worse(
    slower: Mapping[str, Change], rows: Mapping[str, Row], name: str, unmeasured: str
) -> tuple[list[str], list[str]]:
    """Return sentences on tests that the stored run's code runs as slowly today, and on undecided tests.

    Tests that were not compared with the stored run's code come first; `unmeasured` says why.
    """
    moved, unreached, undecided = [], [], []
    for test, change in slower.items():
        sentence, row = f"{test} {_slower(change, name)}", rows.get(test)
        if row is None:
            unreached.append(f"{sentence}, and was not compared with the stored run's code: {unmeasured}")
        elif not change.slower:
            continue  # the A/B run cleared the suspect, or counts it among those that it left undecided
        elif row.suspect or row.undecided:
            undecided.append(f"{sentence}, and the comparison with the stored run's code is undecided")
        else:
            moved.append(f"{sentence}, but the stored run's code takes as long today")
    return moved, unreached + undecided


def _slower(change: Change, name: str) -> str:
    how = "looks slower" if change.suspect else "is slower"
    return f"{how}: {change.ratio:.2f} times its {change.quantity} in {name}, limit {change.limit:.4g}"


def _changed_machine(moved: Sequence[str], differences: Sequence[str]) -> list[str]:
    if not moved:
        return []
    environments = "; ".join(differences) or "none was found in what is stored of the two environments"
    more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
    return [f"this machine or its environment changed: {moved[0]}{more}; differences: {environments}"]


def _shown(comparison: Comparison, rows: Mapping[str, Row], *, stored_code: bool) -> dict[str, float]:
    """Return the smallest slow-down that this run could have noticed in each judged test, as a fraction.

    The A/B run of a test with the stored run's code excludes slow-downs above its 95% interval.
    If the stored run's code cannot run, suspected tests stay unmeasured, and the limits decide.
    """
    shown = {}
    for test, change in comparison.changes.items():
        if change.judged:
            row = rows.get(test)
            shown[test] = (change.shown if stored_code else change.limit) - 1
            if row is not None:
                shown[test] = math.inf if row.suspect else min(max(0.0, row.high - 1), shown[test])
    return shown


def _blind(comparison: Comparison, shown: Mapping[str, float], unconfirmed: str) -> list[str]:
    """Return a sentence if less than 95% of the tests would notice a slow-down of their tolerance."""
    if not shown:
        return [f"no test of {comparison.baseline} was measured whose time can be judged on this machine"]
    blind = {test: least for test, least in shown.items() if least > comparison.changes[test].tolerance}
    if len(blind) <= MOST_UNDECIDED * len(shown):
        return []
    test = max(blind, key=blind.__getitem__)
    tolerance = comparison.changes[test].tolerance
    why = unconfirmed or "this machine is too noisy for them; repeat the run when it is quieter"
    return [
        f"{len(blind)} of {len(shown)} tests would not have shown a slow-down as large as their tolerance, "
        f"such as {test} ({tolerance:.0%}): {why}"
    ]


def _summary(comparison: Comparison, shown: Mapping[str, float], decision: Decision | None) -> str:
    if not shown:
        return f"compared with {comparison.baseline}: no test is judged"
    by_tolerance: dict[float, list[float]] = {}
    for test, least in shown.items():
        by_tolerance.setdefault(comparison.changes[test].tolerance, []).append(least)
    parts = [
        _sensitivity(group, "" if len(by_tolerance) == 1 else f" with tolerance {tolerance:.0%}")
        for tolerance, group in sorted(by_tolerance.items())
    ]
    how = "compared with" if decision is None else "compared with the code of"
    text = f"{how} {comparison.baseline}: {'; '.join(parts)}"
    informational = sum(not change.judged for change in comparison.changes.values())
    if informational:
        text += f"; {units.counted(informational, 'test')} for information only"
    if comparison.new:
        text += f"; {units.counted(len(comparison.new), 'test')} new, such as {comparison.new[0]}"
    return text


def _sensitivity(shown: Sequence[float], which: str) -> str:
    """Return a phrase with the slow-downs that half and 95% of some judged tests could have noticed.

    `shown` has the smallest such slow-down of each test, as a fraction. `which` describes the tests.
    """
    ordered = sorted(shown)
    tests = units.counted(len(ordered), "judged test") + which
    if len(ordered) == 1:
        return f"{tests} would have shown a slow-down of {ordered[0]:.1%}"
    most = ordered[math.ceil((1 - MOST_UNDECIDED) * len(ordered)) - 1]
    return (
        f"half of the {tests} would have shown a slow-down of {median(ordered):.1%}, 95% of them {most:.1%}"
    )
