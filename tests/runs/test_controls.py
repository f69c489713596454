"""The controls of a comparison with a stored run, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project import Finished, Project

ONE_STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single"))
"""
NONE_NOISY = (
    "[decision.cpu]\nquiet_iqr = 0.9\n"  # a copy's own limit is that of quiet rounds, however these differ
)
ALONE = ("perf", "--world-sizes", "1", "--rounds", "4")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a stored run of one training step."""
    made = Project(tmp_path_factory.mktemp("controls"))
    made.experiment.write_text(ONE_STEP)
    (made.root / "perf" / "thresholds.toml").write_text(NONE_NOISY)
    made.run(*ALONE, "--benchmark-json", "base.json").assert_one_sentence(0, "PASS: 1 test measured")
    yield made
    made.clean()


def compare_with(
    project: Project, change: dict[str, Any] | None = None, *arguments: str, limit: int = 10
) -> Finished:
    """Compare a run with the stored one, whose own JSON is changed first."""
    document = json.loads((project.root / "base.json").read_text())
    path = Path(project.root, "changed.json")
    path.write_text(json.dumps(document | {"ddpperf": document["ddpperf"] | (change or {})}))
    return project.run(
        *ALONE, *arguments, f"--benchmark-compare-fail=median:{limit - 1:.0%}", f"--benchmark-compare={path}"
    )


@pytest.mark.figures
def test_slowed_step_takes_the_expected_time(project: Project) -> None:
    run = compare_with(project, limit=2)
    run.assert_one_sentence(125, "controls    a copy of memory ", ", a slowed step ", " (limit 1.125)")
    (line,) = (line for line in run.lines if line.startswith("controls "))
    assert float(line.split("slowed step ")[1].split()[0]) == pytest.approx(1.25, rel=0.15)


@pytest.mark.slow
def test_missing_slow_down_is_no_verdict(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    without = project.root / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text(
        "import ddpperf.measuring.clock\nddpperf.measuring.clock.delayed = lambda step, *_: step\n"
    )
    monkeypatch.setitem(project.environment, "PYTHONPATH", f"{without}:{project.environment['PYTHONPATH']}")
    compare_with(project).assert_one_sentence(125, "NO VERDICT: the positive control failed: ", "limit 1.125")
