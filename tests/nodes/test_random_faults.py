"""Faults of nodes at random moments in network namespaces, and the time that nodes need to join."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.outcomes import table
from tests.namespaces import needs_namespaces
from tests.nodes.fault_runs import KINDS, join_seconds, run_faults

pytestmark = [pytest.mark.slow, needs_namespaces]
JOIN_SECONDS = 15.0


def test_each_fault_is_reported_and_leaves_nothing() -> None:
    outcomes = run_faults(len(KINDS), seed=0)
    assert [outcome for outcome in outcomes if outcome.problems()] == [], table(outcomes)


@pytest.mark.figures
def test_four_nodes_join_in_time(figure: Callable[[str, Callable[[], float], float, str], None]) -> None:
    figure("join of 4 nodes", lambda: join_seconds(4), JOIN_SECONDS, "s")
