"""Steps launched by the CPU have a limit on CPU seconds: the worst of enough runs plus a margin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.specs import Spec
from tests.generated import BOUNDED
from tests.project import script
from tests.unit.test_update_thresholds import QUIET, commit, training, written


@pytest.fixture(scope="module", name="script")
def update_thresholds() -> ModuleType:
    return script("update_thresholds")


def commit_launched(root: Path, *, cpu_seconds: Sequence[float | None]) -> None:
    """Write runs of one case; None for a run without CPU seconds."""
    for cpu in cpu_seconds:
        counted = {} if cpu is None else {"cpu_seconds": cpu}
        commit(
            root, {("test_weak", training()): {"images_per_second": 100.0, "launch_bound": 1.0, **counted}}
        )


def test_launched_step_is_limited_to_25_percent_more(script: ModuleType, tmp_path: Path) -> None:
    """Whether launches bind a step depends on the machine's CPU."""
    for factor in QUIET:
        values = {"images_per_second": 100 * factor, "speedup": 2 * factor, "cpu_seconds": 0.00412 * factor}
        metrics: dict[tuple[str, Spec], dict[str, float]] = {
            ("test_weak", training(1)): {**values, "launch_bound": 3.6},
            ("test_weak", training(2)): {**values, "launch_bound": 1.0},
            ("test_weak", training(4)): values,
        }
        commit(tmp_path, metrics, gpus="a")
    *launched, other = written(script, tmp_path)
    assert [one.where["world_size"] for one in launched] == [1, 2]
    for one in launched:
        assert one.bounds == {"cpu_seconds": 0.00526}  # 1.25 * 1.02 * 4.12 ms = 5.253 ms
        assert all(one.violations({"cpu_seconds": 0.00412 * factor}) == [] for factor in QUIET)
        assert one.violations({"cpu_seconds": 0.0053}) != []
    assert other.bounds == {"speedup": 1.84, "images_per_second": 92.1}


def test_captured_case_keeps_its_floors(script: ModuleType) -> None:
    runs = [{"images_per_second": 100.0, "cpu_seconds": 0.004, "launch_bound": 1.0}] * 5
    assert script.bounds(runs, captured=True) == {"images_per_second": 95.0}
    assert script.bounds(runs, captured=False) == {"cpu_seconds": 0.005}


@pytest.mark.parametrize(
    ("cpu_seconds", "thresholds"),
    [
        ((4, 4, 4, 3.5, 4.5), 1),  # 25 % of the median
        ((4, 4, 4, 3.499, 4.5), 0),
        ((4, 4, 4, 4, 5.01), 0),
        ((4, 4, 4, 4), 0),  # too few runs
        ((4, 4, 4, 4, None), 0),  # not counted in every run
        ((None,) * 5, 0),  # nor do images per second count instead
        ((0, 0, 0, 0, 0), 0),
    ],
)
def test_only_agreeing_cpu_seconds_give_a_limit(
    script: ModuleType, tmp_path: Path, cpu_seconds: Sequence[float | None], thresholds: int
) -> None:
    commit_launched(tmp_path, cpu_seconds=cpu_seconds)
    assert len(written(script, tmp_path)) == thresholds


def test_noisy_rounds_do_not_matter_for_cpu_seconds(script: ModuleType, tmp_path: Path) -> None:
    commit_launched(tmp_path, cpu_seconds=[0.004] * 5)
    for path in (tmp_path / "perf" / "baselines" / "h200x4").iterdir():
        document = json.loads(path.read_text())
        document["benchmarks"][0]["extra_info"]["ddpperf"]["samples"][0]["seconds"] = [
            [0.1],
            [0.1],
            [0.2],
            [0.2],
        ]
        path.write_text(json.dumps(document))
    assert [one.bounds for one in written(script, tmp_path)] == [{"cpu_seconds": 0.005}]


@BOUNDED
@given(st.floats(min_value=1e-6, max_value=1e3))
def test_limits_are_rounded_up(script: ModuleType, worst: float) -> None:
    most = float(script.raised(worst))
    assert 1.25 * worst * (1 - 1e-12) <= most < 1.25 * worst * 1.01
    assert float(f"{most:.3g}") == pytest.approx(most, rel=1e-12)
