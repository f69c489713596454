"""A plain run whose suspects can be measured beside the stored run's code: only that decides about them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.results.stored_runs import Storage
from ddpperf.verdict.ab_answer import Confirmed
from ddpperf.verdict.settings import read_decision
from ddpperf.workers.interpreter import Side

CPU = read_decision({}, name="x")["cpu"]


def plain_run(**found: list[str]) -> PlainRun:
    """Return a run whose comparison found these."""
    sides = Sides(base=Side(name="A"), candidate=Side(name="B"), spec_fields={}, delay_seconds=0.0)
    options: Any = SimpleNamespace(replicates=None, device="cpu", slower_ratio=None)
    storage = Storage(root=Path(), hardware_key="x")
    run = PlainRun(options, CPU, storage, None, ABRun(sides, CPU, "cpu"))
    comparison: Any = SimpleNamespace(
        **{"slower": [], "suspects": [], "untrusted": list, "unseen": list, "failures": dict} | found
    )
    run.comparison = comparison
    return run


def test_suspect_without_confirmation_is_missing() -> None:
    """As when the confirmation is interrupted: what is slower than a stored time may be the machine's fault."""
    answer = plain_run(slower=["t"], suspects=["u"]).answer({}, [], [])
    assert isinstance(answer, Confirmed)
    assert answer.failures() == {}
    assert list(answer.judgement.missing) == ["t", "u"]


def test_comparison_without_suspects_is_the_answer() -> None:
    run = plain_run()
    assert run.answer({}, [], []) is run.comparison
