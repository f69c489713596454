"""A plain run whose suspects can be measured beside the stored run's code: only that decides about them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.results.stored_runs import Storage
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from ddpperf.workers.interpreter import Side

CPU = read_decision({})["cpu"]


def plain_run(**ratios: float) -> PlainRun:
    """Return a run that found these ratios to the stored times, with limits of 1.05 and 1.1."""
    sides = Sides(base=Side(name="A"), candidate=Side(name="B"), spec_fields={}, delay_seconds=0.0)
    options: Any = SimpleNamespace(replicates=None, device="cpu", slower_ratio=None)
    storage = Storage(root=Path(), hardware_key="x")
    run = PlainRun(options, CPU, storage, None, ABRun(sides, CPU, "cpu"))
    changes = {
        test: Change(then_seconds=1.0, now_seconds=ratio, limit=1.1, suspect_limit=1.05)
        for test, ratio in ratios.items()
    }
    run.comparison = Comparison(baseline="0001_x.json", changes=changes)
    return run


def test_suspect_without_confirmation_is_undecided() -> None:
    """The confirmation was interrupted: the slow-down may be the machine's."""
    answer = plain_run(t=1.2, u=1.07).answer({}, [])
    assert answer is not None
    assert answer.worse == {}
    reason = "was to be measured beside the stored run's code, and was not"
    assert list(answer.undecided[:2]) == [f"t {reason}", f"u {reason}"]


def test_comparison_without_suspects_is_the_answer() -> None:
    run = plain_run(t=1.01)
    assert run.comparison is not None
    assert run.answer({}, []) == run.comparison.answer()
