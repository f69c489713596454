"""perf/thresholds.toml: each entry holds for a case that the default suite collects."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from functools import cache

import pytest

from ddpperf.specs import Spec
from ddpperf.verdict.thresholds import (
    EVERY_MACHINE,
    BoundKind,
    Threshold,
    bound_kind,
    read_thresholds,
)
from tests.command_line import reader, suite
from tests.project import REPOSITORY

MACHINES = ("cpu2-other", "other1x1", "other1x2", "other1x4", "other1x8")
THRESHOLDS = read_thresholds(tomllib.loads((REPOSITORY / "perf" / "thresholds.toml").read_text()))
FLOORS = [threshold for threshold in THRESHOLDS if threshold.hardware == EVERY_MACHINE]

Cases = Callable[..., list[tuple[str, Spec]]]


@pytest.fixture(scope="module")
def cases(pytestconfig: pytest.Config) -> Cases:
    """Return a function that lists the collected cases to which a threshold applies, with its images."""
    read = reader(pytestconfig)

    @cache
    def collected(hardware: str, digest: str) -> list[tuple[str, Spec, set[str]]]:
        options = read(gpus=0 if hardware.startswith("cpu") else int(hardware.rpartition("x")[2]))
        if digest:
            images = dataclasses.replace(options.data, name="imagefolder", digest=digest)
            options = dataclasses.replace(options, data=images)
        every = [case for cases in suite(options).values() for case in cases.items()]
        return [(name.partition("[")[0], spec, marks) for name, (spec, marks) in every if spec is not None]

    def applying(threshold: Threshold, hardware: str, *, core: bool = False) -> list[tuple[str, Spec]]:
        left_out = {"skip", "slow"} if core else {"skip"}
        every = collected(hardware, str(threshold.where.get("digest", "")))
        kept = [(test, spec) for test, spec, marks in every if left_out.isdisjoint(marks)]
        return [case for case in kept if threshold.applies(*case)]

    return applying


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: str(threshold.number))
def test_each_threshold_holds_for_a_collected_case(threshold: Threshold, cases: Cases) -> None:
    hardware = MACHINES if threshold.hardware == EVERY_MACHINE else (threshold.hardware,)
    core = "speedup" in threshold.bounds or "efficiency" in threshold.bounds  # others may need --full
    assert any(cases(threshold, key, core=core) for key in hardware), (
        f"threshold {threshold.number} fits no case; correct or delete it"
    )


def test_thresholds_are_few_and_bound_no_times() -> None:
    """Whether a time got longer is the question of --benchmark-compare."""
    assert len(THRESHOLDS) <= 40
    assert {metric for threshold in THRESHOLDS for metric in threshold.bounds} == {
        "ddp_over_data_parallel",
        "efficiency",
        "gradients_over_parameters",
        "speedup",
        "speedup_over_eager",
        "test_accuracy",
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_floors_in_the_core_suite(machine: str, cases: Cases) -> None:
    applying = [threshold for threshold in FLOORS if cases(threshold, machine, core=True)]
    metrics = {metric for threshold in applying for metric in threshold.bounds}
    several = {"efficiency", "ddp_over_data_parallel", "gradients_over_parameters"}
    expected = {
        "cpu2-other": {"gradients_over_parameters"},
        "other1x1": {"speedup_over_eager"},
    }.get(machine, several | {"speedup_over_eager"})
    assert metrics == expected


def test_floors_on_a_cpu_are_exact(cases: Cases) -> None:
    """Times on a CPU differ too much for a floor that holds on every machine."""
    on_cpu = [threshold for threshold in FLOORS if cases(threshold, "cpu2-other")]
    assert {bound_kind(metric) for threshold in on_cpu for metric in threshold.bounds} == {BoundKind.EXACT}


@pytest.mark.parametrize("machine", ["other1x2", "other1x4", "other1x8"])
def test_efficiency_has_a_floor_on_all_gpus(machine: str, cases: Cases) -> None:
    (floor,) = (threshold for threshold in FLOORS if "efficiency" in threshold.bounds)
    assert int(machine[-1]) in {spec.world_size for _, spec in cases(floor, machine, core=True)}
