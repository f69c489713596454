"""The judgement of the first measurements, and repeated measurements of some tests.

A comparison with a stored run is confirmed by an A/B run against the stored run's code. An A/B run
repeats suspected and undecided tests, at most twice. Each measurement takes new processes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.errors import Refused
from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.base_checkout import stored_sides
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.plugin.session import Session
from ddpperf.specs import Spec
from ddpperf.verdict.two_stage_test import LOOKS

ROUNDS = 6  # on each process set beside the stored run's code, where the time is short


def judge(session: Session, items: Sequence[pytest.Item]) -> None:
    """Compare the first measurements, and measure tests again that need more process sets.

    items: the collected tests.
    """
    first, run = session.passes[0], session.run
    if not first.measured():
        return
    if isinstance(run, ABRun):
        late = _look_again(session, run, items, run.judge(first))
        run.late = _late(session, late) if late else ""
    elif tests := run.screen(first, session.expected()):
        _confirm(session, run, items, tests)
    else:
        run.unconfirmed = ""


def _confirm(session: Session, plain: PlainRun, items: Sequence[pytest.Item], tests: Sequence[str]) -> None:
    """Confirm a comparison: measure tests in an A/B run of the stored run's code and this code.

    tests: suspected regressions, and every test that is too imprecise to notice a slow-down as large as
    its tolerance. The most suspicious test comes first.
    """
    options, baseline = session.options, session.inputs.baseline
    assert baseline is not None
    assert plain.comparison is not None
    try:
        root, cleanup = session.inputs.storage.root, session.cleanup
        sides = options.sides or stored_sides(baseline, root, options, cleanup)
    except Refused as refused:
        plain.no_stored_code = f"they cannot be measured beside the stored run's code, since {refused}"
        return
    same_work, slower = _same_work(session), plain.comparison.looks_slower
    decides = Counter(same_work[test] for test in tests)  # how many tests a measurement decides
    in_order = sorted(tests, key=lambda test: -math.inf if test in slower else -decides[same_work[test]])
    beside = ABRun(
        sides,
        session.inputs.settings.beside_stored_code(options.device),
        options.device,
        rounds=options.rounds if "--rounds" in options.given else ROUNDS,
        confirms=plain.comparison,
        same_work=same_work,
    )
    until = time.monotonic() + options.max_seconds / 2
    plain.confirmation = beside
    try:
        session.begin_pass(beside, beside.replicates)
        left = _measure(session, items, beside.different(in_order), until)
        undecided = beside.judge(session.passes[-1])
    except KeyboardInterrupt:
        beside.judge(session.passes[-1], controls=False)
        beside.end()
        raise
    late = _look_again(session, beside, items, undecided)
    plain.unconfirmed = ""
    if left:
        plain.unconfirmed = (
            f"half of --max-seconds {options.max_seconds:.0f} ended before {left} of the measurements "
            "beside the stored run's code; pass more seconds"
        )
    elif late:
        plain.unconfirmed = _late(session, late)


def _late(session: Session, count: int) -> str:
    """Return a sentence on the tests that were not measured again in time."""
    what = "open test was" if count == 1 else "open tests were"
    seconds = session.options.max_seconds
    return f"--max-seconds {seconds:.0f} ended before {count} {what} measured again; pass more seconds"


def _same_work(session: Session) -> dict[str, str]:
    """Return for each measured test the test with equal work and the fewest references."""
    first = session.passes[0]
    specs = {test: measured.spec for test, measured in first.measured().items()}
    references = {test: len(first.measures[test].record.references) for test in specs}
    cheapest: dict[Spec, str] = {}
    for test in sorted(specs, key=references.__getitem__):
        cheapest.setdefault(specs[test], test)
    return {test: cheapest[spec] for test, spec in specs.items()}


def _look_again(session: Session, run: ABRun, items: Sequence[pytest.Item], tests: list[str]) -> int:
    """Measure suspected and undecided tests of an A/B run again in new processes, at most twice.

    The first repeat of an A/B run that the user asked for has no time limit until a test is worse.
    The first repeat of a confirmation has at least half of its seconds. Returns how many measurements
    had no time left.
    """
    options, late = session.options, 0
    end = session.outcomes.begun + options.max_seconds
    asked_for = run is session.run
    first_end = end if asked_for else max(end, time.monotonic() + options.max_seconds / 4)
    try:
        for look in range(LOOKS):
            if not tests:
                break
            until, may_go_on = end if look else first_end, asked_for and not look
            if time.monotonic() > until and not may_go_on:
                return len(tests)
            session.begin_pass(run, run.look_replicates)
            is_enough = partial(run.has_worse, session.passes[-1]) if may_go_on else None
            try:
                late = _measure(session, items, run.different(tests), until, is_enough)
            finally:  # an interrupted look decides what it measured
                tests = run.look(session.passes[-1])
    finally:
        run.end()
    return late


def _measure(
    session: Session,
    items: Sequence[pytest.Item],
    tests: Sequence[str],
    until: float,
    is_enough: Callable[[], bool] | None = None,
) -> int:
    """Measure tests in the processes that have just begun, and return how many did not fit into the time.

    until: the time.monotonic() value at which the measurements should have ended. After the first
    test, a test is left out if it would take longer. A test whose work was just measured takes no time.
    is_enough: whether the measurements so far are enough. Until then, no test is left out.
    """
    by_test = {item.nodeid: item for item in items}
    left = 0
    for place, test in enumerate(tests):
        would_end = time.monotonic() + (_expected_seconds(session, test) if place else 0.0)
        if would_end > until and not _was_measured(session, test) and (is_enough is None or is_enough()):
            left += 1
            continue
        if by_test[test].session.shouldfail or by_test[test].session.shouldstop:  # as with -x
            break
        session.progress.stage = f"comparison {place + 1} of {len(tests)}"
        for report in runtestprotocol(by_test[test], log=False):
            if report.failed:  # the first measurement reported everything else
                by_test[test].ihook.pytest_runtest_logreport(report=report)
    return left


def _was_measured(session: Session, test: str) -> bool:
    """Return whether another test of the newest pass had the same work as this test in the first pass."""
    first, newest = session.passes[0].measured(), session.passes[-1].measured()
    work = {(measured.spec, measured.candidate_spec) for measured in newest.values()}
    return test in first and (first[test].spec, first[test].candidate_spec) in work


def _expected_seconds(session: Session, test: str) -> float:
    """Return about how long the new processes take for a test, from its first measurement."""
    measure, record = session.measures[test], session.measures[test].record
    if record.measured is None:
        return 0.0
    pool = session.passes[-1].pool
    references = () if pool.options.time_only else record.references.values()
    overhead = session.outcomes.seconds[test] - measure.counted_seconds
    return overhead + sum(map(pool.expected_seconds, (record.measured, *references)))
