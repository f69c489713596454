"""The second look of a comparison with a stored run: it alone decides about suspects, and without it nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddpperf.plugin.ab_run import Gate
from ddpperf.plugin.options.sides import Sides
from ddpperf.verdict.ab_answer import Confirmed
from ddpperf.verdict.settings import read_decision
from ddpperf.workers.interpreter import Side


def gate() -> Gate:
    sides = Sides(base=Side(name="A"), candidate=Side(name="B"), spec_fields={}, delay_seconds=0.0)
    return Gate(sides, read_decision({}, name="x")["cpu"], "cpu", None, confirms=True)


def comparison(**found: list[str]) -> Any:
    return SimpleNamespace(
        **{"slower": [], "suspects": [], "untrusted": list, "unseen": list, "failures": dict} | found
    )


def test_suspects_that_were_not_measured_again_are_holes() -> None:
    """As when the second look is interrupted: what is slower than a stored time may be the machine's fault."""
    interrupted = gate()
    assert interrupted.suspects_of(comparison(slower=["t"], suspects=["u"])) == ["t", "u"]
    answer = interrupted.answer(comparison(slower=["t"], suspects=["u"]))
    assert isinstance(answer, Confirmed)
    assert answer.failures() == {}
    assert list(answer.judgement.missing) == ["t", "u"]


def test_without_suspects_the_comparison_says_all() -> None:
    quiet, compared = gate(), comparison()
    assert quiet.suspects_of(compared) == []
    assert quiet.answer(compared) is compared
