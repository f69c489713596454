"""A plain run and its stored run: what its answer says without, and with, a later measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.results.stored_runs import Baseline
from ddpperf.verdict.ab import Decision
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from ddpperf.workers.interpreter import Side

CPU = read_decision({})["cpu"]
STORED = {"torch": "2.11.0", "cores": 2}
SLOWER = "is slower: 1.20 times its step in 0001_x.json, limit 1.1"


def plain_run(**ratios: float) -> PlainRun:
    """Return a run that found these ratios to the stored times, with limits of 1.05 and 1.1."""
    options: Any = SimpleNamespace(replicates=None, rounds=10, device="cpu", slower_ratio=None)
    baseline = Baseline(path=Path("0001_x.json"), measured={}, when="", environment=STORED)
    setup: Any = SimpleNamespace(settings=CPU, storage=None, baseline=baseline)
    run = PlainRun(options, setup)
    changes = {
        test: Change(then_seconds=1.0, now_seconds=ratio, limit=1.1, suspect_limit=1.05)
        for test, ratio in ratios.items()
    }
    run.comparison = Comparison(baseline=baseline.path.name, changes=changes)
    return run


def answer(run: PlainRun, environment: dict[str, Any]) -> Answer:
    found = run.answer({}, [], environment)
    assert found is not None
    return found


def test_strict_limit_decides_without_stored_code() -> None:
    run = plain_run(t=1.2, u=1.07)
    run.no_stored_code = "git is gone"
    assert answer(run, STORED).worse == {"t": SLOWER}


def test_interrupted_confirmation_leaves_a_suspect_undecided() -> None:
    """The slow-down may be the machine's."""
    run = plain_run(t=1.2, u=1.07)
    sides = Sides(base=Side(name="A"), candidate=Side(name="B"), spec_fields={})
    run.confirmation = ABRun(sides, CPU, "cpu", rounds=5)
    run.confirmation.decision = Decision([], CPU)
    run.unconfirmed = "the run was interrupted"
    found = answer(run, STORED)
    assert found.worse == {}
    reason = "and was not measured beside the stored run's code: the run was interrupted"
    assert found.undecided[0] == f"t {SLOWER}, {reason}"


def test_comparison_without_suspects_passes() -> None:
    found = answer(plain_run(t=1.01), STORED)
    assert (found.worse, found.untrusted, found.undecided) == ({}, [], [])
    assert found.summary.startswith("compared with 0001_x.json: 1 judged test would have shown")
