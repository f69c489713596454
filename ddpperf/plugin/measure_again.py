"""The measurements of a test run after its first pass over the tests.

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
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.plugin.session import Session
from ddpperf.plugin.stored_code import stored_sides
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
        _look_again(session, run, items, run.judge(first))
    elif tests := run.screen(first, session.expected()):
        _confirm(session, run, items, tests)
    else:
        run.unconfirmed = ""


def _confirm(session: Session, plain: PlainRun, items: Sequence[pytest.Item], tests: Sequence[str]) -> None:
    """Decide tests of a comparison with a stored run by an A/B run beside the stored run's code.

    tests: suspected regressions, and every test whose limit would not show a slow-down as large as
    its tolerance. The most suspicious test comes first.
    """
    options, baseline = session.options, session.setup.baseline
    assert baseline is not None
    assert plain.comparison is not None
    try:
        root, cleanup = session.setup.storage.root, session.resources.cleanup
        sides = options.sides or stored_sides(baseline, root, options, cleanup)
    except Refused as refused:
        plain.no_stored_code = f"they cannot be measured beside the stored run's code, since {refused}"
        return
    same_work, slower = _same_work(session), plain.comparison.looks_slower
    decides = Counter(same_work[test] for test in tests)  # how many tests a measurement decides
    in_order = sorted(tests, key=lambda test: -math.inf if test in slower else -decides[same_work[test]])
    beside = ABRun(
        sides,
        session.setup.settings.beside_stored_code(options.device),
        options.device,
        rounds=options.rounds if "--rounds" in options.given else ROUNDS,
        confirms=plain.comparison,
        same_work=same_work,
    )
    until = time.monotonic() + options.confirm_seconds
    plain.confirmation = beside
    try:
        session.begin_pass(beside, beside.replicates)
        left = _measure(session, items, beside.different(in_order), partial(_is_over, until, None))
        undecided = beside.judge(session.passes[-1])
    except KeyboardInterrupt:
        beside.judge(session.passes[-1], controls=False)
        beside.end()
        raise
    late = _look_again(session, beside, items, undecided)
    plain.unconfirmed = ""
    if left:
        plain.unconfirmed = (
            f"--confirm-seconds {options.confirm_seconds:.0f} ended before {left} of the measurements "
            "beside the stored run's code; pass more seconds"
        )
    elif late:
        plain.unconfirmed = (
            f"--max-seconds {options.max_seconds:.0f} ended before {late} open tests were measured "
            "again; pass more seconds"
        )


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
    """Measure open tests of an A/B run again, until all are decided or the time is over.

    The first repeat of an A/B run that the user asked for has no time limit until a test is worse.
    The first repeat of a confirmation has at least half of its seconds. Returns how many measurements
    had no time left.
    """
    options, late = session.options, 0
    end = session.outcomes.begun + options.max_seconds
    asked_for = run is session.run
    first_end = end if asked_for else max(end, time.monotonic() + options.confirm_seconds / 2)
    try:
        for look in range(LOOKS):
            if not tests:
                break
            until = end if look else first_end
            is_over = partial(_is_over, until, session if asked_for and not look else None)
            if is_over():
                return len(tests)
            session.begin_pass(run, run.look_replicates)
            try:
                late = _measure(session, items, run.different(tests), is_over)
            finally:  # an interrupted look decides what it measured
                tests = run.look(session.passes[-1])
    finally:
        run.end()
    return late


def _is_over(until: float, deciding: Session | None, seconds: float = 0.0) -> bool:
    """Return whether a measurement of some seconds would end too late.

    until: the time.monotonic() value at which the measurements should have ended. deciding: a session
    whose A/B run has more time, as long as no test is worse.
    """
    if time.monotonic() + seconds <= until:
        return False
    if deciding is None:
        return True
    run, (_, *again) = deciding.run, deciding.passes
    assert isinstance(run, ABRun)
    return run.has_failed(again)


def _measure(
    session: Session, items: Sequence[pytest.Item], tests: Sequence[str], is_over: Callable[[float], bool]
) -> int:
    """Measure tests in the processes that have just begun, and return how many did not fit into the time.

    is_over: whether a measurement of some seconds would end too late. After the first test, a test
    is left out if it would take longer.
    """
    by_test = {item.nodeid: item for item in items}
    left = 0
    for place, test in enumerate(tests):
        if is_over(_expected_seconds(session, test) if place else 0.0):
            left += 1
            continue
        if by_test[test].session.shouldfail or by_test[test].session.shouldstop:  # as with -x
            break
        session.progress.stage(f"comparison {place + 1} of {len(tests)}")
        for report in runtestprotocol(by_test[test], log=False):
            if report.failed:  # the first measurement reported everything else
                by_test[test].ihook.pytest_runtest_logreport(report=report)
    return left


def _expected_seconds(session: Session, test: str) -> float:
    """Return about how long the new processes take for a test, from its first measurement."""
    measure, record = session.measures[test], session.measures[test].record
    if record.measured is None:
        return 0.0
    pool = session.passes[-1].pool
    references = () if pool.options.time_only else record.references.values()
    overhead = session.outcomes.seconds[test] - measure.counted_seconds
    return overhead + sum(map(pool.expected_seconds, (record.measured, *references)))
