"""Which cases of ResNet-50 the scaling, breakdown and communication experiments have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, parameters
from ddpperf.plugin.options.options import Options
from perf import test_comm_split, test_scaling, test_step_breakdown
from perf.common.step_specs import RESNET50
from tests.command_line import Read, specs_of

TESTS: dict[str, Any] = {
    "scaling": test_scaling.test_weak_scaling,
    "breakdown": test_step_breakdown.test_step_breakdown,
    "split": test_comm_split.test_comm_split,
}
Cases = Callable[[Options], Iterator[Case]]
CASES: dict[str, Cases] = {name: test.pytestmark[0].kwargs["cases"] for name, test in TESTS.items()}
every_experiment = pytest.mark.parametrize("experiment", TESTS)


def measured(chosen: Options, experiment: str) -> list[tuple[str, int, int]]:
    return [
        (spec.model, spec.world_size, spec.per_rank_batch_size)
        for spec in specs_of(CASES[experiment](chosen))
        if spec.model in RESNET50
    ]


@pytest.mark.parametrize(
    ("experiment", "world_sizes"), [("scaling", (1, 4)), ("breakdown", (1, 4)), ("split", (4,))]
)
def test_gpus_measure_both_stems(experiment: str, world_sizes: tuple[int, ...], read: Read) -> None:
    found = measured(read(gpus=4), experiment)
    assert found == [(model, size, 128) for model in RESNET50 for size in world_sizes]


@every_experiment
def test_core_suite_and_gate_leave_them_out(experiment: str, read: Read) -> None:
    chosen = read("--batch-sizes", "128", gpus=4)
    test = TESTS[experiment]
    found = parameters(experiment, test.pytestmark[0], chosen, Machine(device="cuda"))
    ours = [case for case in found if "resnet50" in str(case.id)]
    assert ours
    for case in ours:
        assert {mark.name for mark in case.marks} & {"slow", "gate"} == {"slow"}


@every_experiment
def test_cpus_skip_them_with_the_option(experiment: str, read: Read) -> None:
    chosen = read(gpus=0)
    assert measured(chosen, experiment) == []
    (case,) = [case for case in CASES[experiment](chosen) if getattr(case, "id", "") == "resnet50"]
    assert "--model resnet50 measures it" in str(case.marks)  # type: ignore[union-attr]
