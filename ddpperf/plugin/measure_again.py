"""The later measurements of a test run, which decide what the first one left open.

A comparison with a stored run measures tests beside the stored run's code. An A/B run measures
suspected regressions and undecided tests once more. Both take new processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.errors import Refused
from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.session import Session
from ddpperf.plugin.stored_code import StoredCode
from ddpperf.specs import Spec
from ddpperf.verdict.two_stage_test import LOOKS


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
        _confirm(session, items, tests)


def _confirm(session: Session, items: Sequence[pytest.Item], tests: Sequence[str]) -> None:
    """Decide tests of a comparison with a stored run by an A/B run beside the stored run's code.

    tests: suspected regressions, and every test whose limit would not show a slow-down as large as
    its tolerance. The most suspicious test comes first.
    """
    plain, options = session.run, session.options
    assert not isinstance(plain, ABRun)
    try:
        sides = options.sides or _sides_of_stored_code(session)
    except Refused as refused:
        plain.unconfirmed = f"they cannot be measured beside the stored run's code, since {refused}"
        return
    settings = session.settings.beside_stored_code(options.device)
    beside = ABRun(sides, settings, options.device, same_work=_same_work(session))
    until = time.monotonic() + options.confirm_seconds
    plain.confirmation = beside
    plain.unconfirmed = "the run was interrupted before they were measured beside the stored run's code"
    try:
        session.begin_pass(sides, beside.replicates)
        left = _measure(session, items, beside.different(tests), until)
        undecided = beside.judge(session.passes[-1])
    except KeyboardInterrupt:
        beside.judge(session.passes[-1], controls=False)
        beside.end()
        raise
    plain.unconfirmed = ""
    if left:
        plain.unconfirmed = (
            f"--confirm-seconds {options.confirm_seconds:.0f} ended before {left} of the tests to "
            "confirm were measured beside the stored run's code; pass more seconds"
        )
    _look_again(session, beside, items, undecided)


def _sides_of_stored_code(session: Session) -> Sides:
    """Return how to run the stored run's code. Raises Refused with the reason if it cannot be run."""
    assert session.baseline is not None
    stored = StoredCode(session.baseline, session.storage.root)
    session.cleanup.callback(stored.remove)
    return stored.sides(session.options)


def _same_work(session: Session) -> dict[str, str]:
    """Return for each measured test the test with equal work and the fewest references."""
    first = session.passes[0]
    specs = {test: measured.spec for test, measured in first.measured().items()}
    references = {test: len(first.measures[test].stored.get("references", ())) for test in specs}
    cheapest: dict[Spec, str] = {}
    for test in sorted(specs, key=references.__getitem__):
        cheapest.setdefault(specs[test], test)
    return {test: cheapest[spec] for test, spec in specs.items()}


def _look_again(session: Session, run: ABRun, items: Sequence[pytest.Item], tests: list[str]) -> None:
    """Measure open tests of an A/B run again, until all are decided or the time is over.

    An A/B run that the user asked for measures them at least once, whatever the time.
    """
    until = session.outcomes.begun + session.options.max_seconds
    try:
        for look in range(LOOKS):
            if not tests or (look and time.monotonic() > until):
                break
            must = math.inf if look == 0 and run is session.run else until
            measured_before = len(session.passes)
            try:
                session.begin_pass(run.sides, run.look_replicates)
                _measure(session, items, run.different(tests), must)
            finally:  # an interrupted look decides what it measured
                for measuring in session.passes[measured_before:]:
                    tests = run.look(measuring)
    finally:
        run.end()


def _measure(session: Session, items: Sequence[pytest.Item], tests: Sequence[str], until: float) -> int:
    """Measure tests in the processes that have just begun, and return how many did not fit into the time.

    until: the time.monotonic() value at which the measurements should have ended. After the first
    test, a test is left out if it would take longer.
    """
    by_test = {item.nodeid: item for item in items}
    left = 0
    for place, test in enumerate(tests):
        if time.monotonic() + (_expected_seconds(session, test) if place else 0.0) > until:
            left += 1
            continue
        for report in runtestprotocol(by_test[test], log=False):
            if report.failed:  # the first measurement reported everything else
                by_test[test].ihook.pytest_runtest_logreport(report=report)
    return left


def _expected_seconds(session: Session, test: str) -> float:
    """Return about how long the new processes take for a test, from its first measurement."""
    measure, measured = session.measures[test], session.measures[test].measured
    if measured is None:
        return 0.0
    now, then = session.passes[-1].pool, session.passes[0].pool
    work = len(now.sides) * now.options.rounds / (len(then.sides) * then.options.rounds)
    overhead = session.outcomes.seconds[test] - measure.counted_seconds
    return overhead + work * measured.counted_seconds()
