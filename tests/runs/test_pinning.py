"""Ranks and the controller stay on their cores."""

from __future__ import annotations

import os

import pytest

from ddpperf.machine.hardware import core_count
from ddpperf.workers.rank_commands import Rank
from tests.project import Project

ALLOWED = os.sched_getaffinity(0)


def test_rank_is_on_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    core = max(ALLOWED)
    try:
        Rank(rank=1).setup("cpu", [[min(ALLOWED)], [core]])
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, ALLOWED)


PINNED = """
import os
from ddpperf.machine import cores
import pytest
from ddpperf.specs import SamplerSpec
from tests.faults import failing

cores.MIN_CORES = 1  # so that two cores are enough

def test_one(measure):
    measure(SamplerSpec(world_size=1, epoch_images=10))
    (rank,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    print("CONTROLLER", sorted(os.sched_getaffinity(0)), "RANK", sorted(os.sched_getaffinity(int(rank))))

@pytest.mark.parametrize("spec", [failing("kill", world_size=1)])
def test_fault(measure, spec):
    measure(spec)
"""

AFTERWARDS = """
def pytest_unconfigure():
    import os
    print("AFTERWARDS", sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    core_count() < len(ALLOWED) or len(ALLOWED) < 2, reason="needs two cores without a quota to be pinned"
)
def test_run_is_pinned_and_returns_its_cores(project: Project) -> None:
    project.experiment.write_text(PINNED)
    with (project.root / "conftest.py").open("a") as conftest:
        conftest.write(AFTERWARDS)
    finished = project.run("perf", "--world-sizes", "1", "-s")
    assert finished.status == 1, finished
    (run,) = project.saved_runs()
    pinning = run["ddpperf"]["environment"]["pinning"]
    (rank,) = pinning["ranks"]
    assert {*pinning["controller"], *rank} == ALLOWED
    held = f"CONTROLLER {pinning['controller']} RANK {rank}"
    assert any(line.endswith(held) for line in finished.lines), finished
    assert f"AFTERWARDS {sorted(ALLOWED)}" in finished.lines, finished
    assert run["ddpperf"]["environment"]["cores"] == run["machine_info"]["cpu"]["count"] == len(ALLOWED)
