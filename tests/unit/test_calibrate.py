"""Trials of verdicts: which slow-downs are planned and put into steps, and what is counted."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import Spec, TrainingSpec, to_json
from ddpperf.workers.rank_commands import Opened
from tests.generated import TWO
from tools import calibrate, slow_downs
from tools.calibrate import FACTORS, planned, tables, trials_of
from tools.slow_downs import EVERY, VARIABLE, SlowDown, key_of, slowed

ONE = TrainingSpec(**{**TWO, "world_size": 1}, strategy="single")
BOTH = TrainingSpec(**TWO, strategy="ddp")
STEP = 0.004  # seconds of a simulated step
CPU = torch.device("cpu")


def row(spec: Spec, metric: str = "time", **fields: Any) -> dict[str, Any]:
    usual = {"tolerance": 0.16, "base": STEP, "ratio": 1.0, "low": 0.9, "high": 1.1, "finding": "not worse"}
    return {"spec": key_of(spec), "metric": metric, "sets": 3, "steps": 300} | usual | fields


def run(*trials: dict[str, Any], verdict: str = "PASS") -> dict[str, Any]:
    return {"machine": "cpu2", "run": "gate", "options": [], "verdict": verdict, "trials": list(trials)}


EQUAL = run(*(row(spec, metric) for spec in (ONE, BOTH) for metric in ("time", "mean_time")))


# --- plans


def test_kinds_and_sizes_that_lack_trials_are_planned() -> None:
    """After enough runs, each size was planned about as often as wanted, for each kind on a CPU."""
    runs, planned_often = [EQUAL], Counter[tuple[str, float]]()
    for seed in range(600):
        slow = planned(runs, seed, 0.5)
        planned_often.update((one.kind, one.factor) for one in slow.values())
        put = [row(ONE, "mean_time" if s.kind == "1 in 40" else "time", **asdict(s)) for s in slow.values()]
        runs.append(run(*EQUAL["trials"], *put))
    assert {kind for kind, _ in planned_often} == {"constant", "percent", "one rank", "1 in 40"}
    for kind in ("constant", "percent", "1 in 40"):
        often = [planned_often[kind, factor] / wanted for factor, wanted in FACTORS.items()]
        assert max(often) < 1.5 * min(often)


def test_size_is_a_multiple_of_the_tolerance() -> None:
    for seed in range(20):
        for slow in planned([EQUAL], seed, 1.0).values():
            assert slow.fraction == pytest.approx(slow.factor * 0.16)
            assert slow.value == STEP
    assert planned([EQUAL], 1, 0.0) == {}
    only = planned([EQUAL], 1, 1.0, "percent", 0.25)
    assert {(slow.kind, slow.factor) for slow in only.values()} == {("percent", 0.25)}


def test_rare_stalls_need_enough_steps() -> None:
    few = run(*(one | {"steps": 3 * EVERY - 1} for one in EQUAL["trials"]))
    kinds = {slow.kind for seed in range(50) for slow in planned([few], seed, 1.0).values()}
    assert "1 in 40" not in kinds
    assert {"constant", "one rank"} <= kinds


# --- steps


class Clock:
    """A clock that a step advances by STEP seconds, and each reading by a microsecond."""

    now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = Clock()


class Advancing(Measurement):
    def step(self) -> None:
        CLOCK.now += STEP


def opened(spec: Spec, *, rank: int, device: torch.device, report: object) -> Opened:
    work = Advancing()
    return Opened(spec=spec, measurement=work, step=work.step)


@pytest.mark.parametrize(
    ("kind", "spec", "rank", "longer"),
    [
        ("constant", ONE, 0, 0.5),
        ("percent", ONE, 0, 0.5),
        ("CPU only", ONE, 0, 0.5),
        ("1 in 40", ONE, 0, 0.5),
        ("1 in 40", BOTH, 1, 0.0),
        ("one rank", BOTH, 1, 0.5),
        ("one rank", BOTH, 0, 0.0),
        ("memory", ONE, 0, 0.0),
    ],
)
def test_step_gets_longer_by_its_slow_down(
    kind: str, spec: Spec, rank: int, longer: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDown(kind=kind, factor=1.0, fraction=0.5, value=STEP)
    (tmp_path / "plan.json").write_text(json.dumps({key_of(spec): asdict(slow)}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan.json"))
    monkeypatch.setattr(time, "perf_counter", CLOCK.read)
    found = []
    for other in (opened, slowed(opened)):
        delayed = replace(spec, delay_seconds=0.001)  # as the positive control: the slow-down stays
        step = other(delayed, rank=rank, device=CPU, report=lambda done: None).step
        began = CLOCK.now
        for _ in range(EVERY):
            step()
        found.append((CLOCK.now - began) / EVERY)
    assert found[1] / found[0] - 1 == pytest.approx(longer, abs=0.01)


def test_other_specs_keep_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("{}")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan.json"))
    found = slowed(opened)(ONE, rank=0, device=CPU, report=lambda done: None)
    assert isinstance(found.measurement, Advancing)
    assert found.step == found.measurement.step


# --- trials and tables


def test_each_judged_row_is_a_trial() -> None:
    stored_row = {**row(ONE), "tests": ["t[1]"], "control": None}
    rows = [
        stored_row,
        {**stored_row, "metric": "sent_bytes"},
        {**stored_row, "tests": [], "control": "copy of memory"},
        {**stored_row, "tolerance": None},
    ]
    benchmarks = [{"fullname": "t[1]", "extra_info": {"ddpperf": {"spec": to_json(ONE)}}}]
    stored = {"benchmarks": benchmarks, "ddpperf": {"judged": {"rows": rows}}}
    slow = SlowDown(kind="constant", factor=1.0, fraction=0.16, value=STEP)
    (trial,) = trials_of(stored, {key_of(ONE): slow})
    assert trial == row(ONE) | asdict(slow)
    (equal,) = trials_of(stored, {key_of(BOTH): slow})
    assert equal == row(ONE)


def slow_row(finding: str, high: float, metric: str = "time", kind: str = "constant") -> dict[str, Any]:
    put = asdict(SlowDown(kind=kind, factor=1.0, fraction=0.16, value=STEP))
    return row(ONE, metric, finding=finding, high=high, **put)


def test_tables_count_false_alarms_and_what_was_found() -> None:
    false = run(row(ONE, finding="worse"), row(BOTH), verdict="FAIL")
    found = run(slow_row("worse", 1.2), row(BOTH), verdict="FAIL")
    undecided = run(slow_row("undecided", 1.3), row(BOTH), verdict="NO VERDICT")
    wrong = run(slow_row("not worse", 1.15), slow_row("not worse", 1.3, "mean_time"))
    text = tables([EQUAL, false, found, undecided, wrong])
    equal, slower = (line for line in text.splitlines() if line.startswith(("| cpu2 ", "| constant ")))
    # At most: the rate p with (1 - p)^6 + 6 p (1 - p)^5 = 5%
    assert equal == "| cpu2 | gate | 6 | 1 | 58.18% | 1 FAIL, 1 PASS | 10.0% | 10.0% |"
    assert slower == "| constant |  |  | 1 of 3 (1% to 91%) |  |  | 1 |"


def test_metric_of_the_kind_decides_what_was_excluded() -> None:
    """A PASS that excludes a slow-down of the median says nothing about one step of 40."""
    rare = [
        slow_row("not worse", 1.05, "time", "1 in 40"),
        slow_row("undecided", 1.5, "mean_time", "1 in 40"),
    ]
    assert "| 1 in 40 |  |  | 0 of 1 (0% to 98%) |  |  | 0 |" in tables([run(*rare)])
    assert {*slow_downs.KINDS} >= calibrate.METRIC.keys()
