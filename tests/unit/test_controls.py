"""The controls of a comparison with a stored run: a memory copy and a put-in slow-down."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpperf.plugin.control_steps import positive_control
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import COPY, Baseline, PastRun
from ddpperf.specs import CopySpec, EpochSpec, Spec
from ddpperf.verdict.run_history import bounds, spread
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Change, Comparison, Controls, Reference, negative_control
from tests.canned import CannedSuite, step_seconds
from tests.project import Finished, Project
from tests.ranks.test_run import SMALL
from tests.stored import QUIET, measured

CPU = read_decision({})["cpu"]
ONE_STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single"))
"""
NONE_NOISY = (
    "[decision.cpu]\nquiet_iqr = 0.9\n"  # a copy's own limit is that of quiet rounds, however these differ
)
ALONE = ("perf", "--world-sizes", "1", "--rounds", "4")


def copied(scale: float = 1.0, nbytes: int = 2**20) -> Measured:
    return measured(*(scale * seconds for seconds in QUIET), spec=CopySpec(world_size=1, nbytes=nbytes))


def negative(
    now: Measured | None, then: Measured | None, limit: float | None = None, *history: Measured
) -> Controls:
    runs = [PastRun(measured={COPY: each}, promoted=False) for each in history]
    baseline = Baseline(path=Path("x.json"), measured={}, when="", copied=then)
    reference = Reference(baseline=baseline, settings=CPU, device="cpu", limit=limit, history=runs)
    return Controls(negative=negative_control(now, reference, compared=9))


def test_copy_outside_its_limit_fails() -> None:
    usual = negative(copied(), copied()).negative
    assert isinstance(usual, Change)
    _, slower = bounds(
        spread([], CPU.run_spread), margin=CPU.of("time").margin, suite_alpha=0.01, compared=10
    )
    assert usual.limit == pytest.approx(math.exp(slower))
    for scale, fails in (
        (1.0, False),
        (0.99 * usual.limit, False),
        (1.01 * usual.limit, True),
        (1 / 1.01 / usual.limit, True),
    ):
        sentences = negative(copied(scale), copied()).untrusted()
        assert bool(sentences) == fails, scale
        assert all(each.startswith("the negative control failed: a copy of memory") for each in sentences)


def test_history_narrows_the_limit_of_the_copy() -> None:
    usual, known = negative(copied(), copied()), negative(copied(), copied(), None, *[copied()] * 9)
    given = negative(copied(), copied(), 3.0)
    limits = [found.negative.limit for found in (known, usual, given) if isinstance(found.negative, Change)]
    assert limits == sorted(set(limits))
    assert limits[2] == 3.0
    assert negative(copied(), copied(), 1.001).negative == usual.negative, (
        "what is asked of a test says nothing of a copy"
    )


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (copied(), None, "is not in x.json"),
        (None, copied(), "is in x.json but was not measured"),
        (None, None, "is not in x.json"),
        (copied(), copied(nbytes=2), "measures another spec than in x.json"),
    ],
)
def test_missing_copy_is_reported(now: Measured | None, then: Measured | None, words: str) -> None:
    found = negative(now, then)
    assert found.missing == [f"the negative control, a copy of memory, {words}"]
    assert found.untrusted() == []


def test_comparison_without_a_step_lacks_a_control() -> None:
    """As of whole trainings alone: nothing shows that what is slower would be seen."""
    pool: Any = None  # nothing is measured
    run = Measured(spec=SMALL, iterations=1, samples=copied().samples)
    change = Change(then_seconds=1.0, now_seconds=1.0, limit=1.2)
    for changes, missing in (
        (
            {"t": change},
            "the positive control was not measured: no step time was compared with the stored run",
        ),
        ({}, ""),
    ):
        comparison = Comparison(baseline="x.json", changes=changes)
        assert positive_control(comparison, {"t": run}, pool) == missing


def test_delay_is_split_over_the_steps_of_an_epoch() -> None:
    epoch = EpochSpec(world_size=1, per_rank_batch_size=8, strategy="single", epoch_images=32)
    pool: Any = SimpleNamespace(measure=Mock(side_effect=lambda spec: measured(1.0, spec=spec)))
    change = Change(then_seconds=1.0, now_seconds=1.0, limit=1.2, tolerance=0.2)
    comparison = Comparison(baseline="x.json", changes={"t": change})
    positive_control(comparison, {"t": measured(1.0, spec=epoch)}, pool)
    delays = [call.args[0].delay_seconds for call in pool.measure.call_args_list]
    assert delays == [0.0, pytest.approx(0.2 / 4)]


@pytest.mark.parametrize(("ratio", "fails"), [(1.3, False), (1.2, True), (1.0, True)])
def test_slowed_step_within_the_limit_fails(ratio: float, fails: bool) -> None:
    change = Change(then_seconds=1.0, now_seconds=ratio, limit=1.2)
    assert bool(Controls(positive=change).blind()) == fails


# --- canned runs


def save_base(project: Project) -> None:
    """Store a run of one training step as base.json."""
    project.experiment.write_text(ONE_STEP)
    (project.root / "perf" / "thresholds.toml").write_text(NONE_NOISY)
    project.run(*ALONE, "--benchmark-json", "base.json").assert_one_sentence(0, "PASS: 1 test measured")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CannedSuite]:
    """A project with a stored run of one training step."""
    made = CannedSuite(tmp_path_factory.mktemp("controls"))
    save_base(made)
    yield made
    made.clean()


def compare_with(
    project: Project, change: dict[str, Any] | None = None, *arguments: str, limit: float = 10
) -> Finished:
    """Compare a run with the stored one, whose own JSON is changed first."""
    document = json.loads((project.root / "base.json").read_text())
    path = Path(project.root, "changed.json")
    path.write_text(json.dumps(document | {"ddpperf": document["ddpperf"] | (change or {})}))
    return project.run(
        *ALONE, *arguments, f"--benchmark-compare-fail=median:{limit - 1:.0%}", f"--benchmark-compare={path}"
    )


def test_slower_copy_is_no_verdict(project: CannedSuite) -> None:
    stored = Measured.from_json(json.loads((project.root / "base.json").read_text())["ddpperf"]["copied"])
    faster = [
        dataclasses.replace(each, seconds=tuple(tuple(t / 1000 for t in ranks) for ranks in each.seconds))
        for each in stored.samples
    ]
    changed = {"copied": dataclasses.replace(stored, samples=tuple(faster)).to_json()}
    run = compare_with(project, changed, "--benchmark-save=after")
    run.assert_one_sentence(
        125, "NO VERDICT: the negative control failed: a copy of memory", "this machine has changed"
    )
    run.assert_one_sentence(125, "not saved as a baseline: the negative control failed: a copy of memory")


def test_stored_run_without_copy_is_no_verdict(project: CannedSuite) -> None:
    run = compare_with(project, {"copied": None})
    run.assert_one_sentence(125, "NO VERDICT: the negative control, a copy of memory, is not in changed.json")


def test_missing_slow_down_is_no_verdict(project: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_delay(spec: Spec, name: str) -> float:
        return step_seconds(spec, name) - spec.delay_seconds  # which canned sets add

    monkeypatch.setattr(project.canned, "seconds", without_delay)
    compare_with(project).assert_one_sentence(125, "NO VERDICT: the positive control failed: ", "limit 1.125")


def test_controls_are_printed(project: CannedSuite) -> None:
    run = compare_with(project, limit=1.2)
    run.assert_one_sentence(0, "controls    copy of memory ", ", delayed step 1.25")
    (line,) = (line for line in run.lines if line.startswith("controls "))
    assert float(line.split("delayed step ")[1].split()[0]) == pytest.approx(1.25, rel=0.01)
