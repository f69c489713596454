"""The controls of a comparison with a stored run, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.project import Project
from tests.unit.test_controls import compare_with, save_base


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a stored run of one training step."""
    made = Project(tmp_path_factory.mktemp("controls"))
    save_base(made)
    yield made
    made.clean()


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
