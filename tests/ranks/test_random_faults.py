"""The tool for faults at random moments, on real ranks: what it reports, and that it can fail."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from tests.faults import of_ranks
from tests.faults.of_ranks import RankFault, RankFaults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankFaults]:
    made = RankFaults()
    yield made
    made.close()


def test_handled_fault_has_no_problems(ranks: RankFaults) -> None:
    fault = RankFault(name="exits", word="exit", cause=of_ranks.EXITED, moments=("round",))
    outcome = ranks.fault(fault, 0, random.Random(1))
    assert outcome.problems() == []
    assert outcome.moment == "round"
    assert outcome.seconds is not None
    assert 0 < outcome.seconds < of_ranks.AT_ONCE


def test_fault_with_another_cause_fails(ranks: RankFaults) -> None:
    fault = RankFault(name="other", signal=signal.SIGKILL, cause="was killed by SIGSEGV", moments=("round",))
    (problem,) = ranks.fault(fault, 0, random.Random(1)).problems()
    assert problem.startswith("the report does not name the cause")
    assert "was killed by SIGKILL" in problem


def test_fault_that_nobody_reports_fails(ranks: RankFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_ranks, "STUCK_SECONDS", 5.0)
    fault = RankFault(name="none", signal=signal.SIGCONT, cause="was killed", moments=("idle",))
    problems = ranks.fault(fault, 0, random.Random(1)).problems()
    assert "the report does not name the cause: ''" in problems


def test_slow_rank_that_is_reported_fails(ranks: RankFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_ranks, "LONGEST_PAUSE", 1000.0)
    monkeypatch.setattr(of_ranks, "DEADLINE_SECONDS", 1.0)
    fault = RankFault(name="slow", word="slow", moments=("round",))
    (problem,) = ranks.fault(fault, 0, random.Random(1)).problems()
    assert "did not answer within 1 s" in problem
