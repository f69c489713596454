"""Kernels on a GPU: replays show theirs, fresh processes agree, profiles cost nothing later."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
import torch

from ddpperf.instruments.kernels import kernel_names
from ddpperf.measuring.clock import seconds_of
from ddpperf.specs import Execution, TrainingSpec
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_stream"),
]

GPU = torch.device("cuda", 0)
SPEC = TrainingSpec(
    world_size=1,
    per_rank_batch_size=32,
    strategy="single",
    model="resnet18_cifar",
    precision="bf16",
    memory_format="channels_last",
    execution="graph",
    input="device",
    epoch_images=32 * 512,
)


def training(spec: TrainingSpec) -> MeasuredStep:
    step = MeasuredStep(TrainingStep(spec, rank=0, device=GPU))
    step.warm_up(10)
    step.step()  # which begins an epoch
    return step


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_a_step_always_has_the_same_kernels(execution: Execution) -> None:
    step = training(replace(SPEC, execution=execution))
    names = kernel_names(step.step, GPU)
    assert len(names) > 20, "convolutions, BatchNorm, the optimizer, ..."
    assert any("batch_norm" in name for name in names)
    assert not [name for name in names if name.startswith(("Mem", "cuda", "aten::", "Optimizer", "autograd"))]
    for _ in range(9):
        assert kernel_names(step.step, GPU) == names


@pytest.mark.parametrize(
    ("execution", "batch"), [("graph", 32), pytest.param("eager", 512, marks=pytest.mark.slow)]
)
def test_a_profile_does_not_slow_later_steps(execution: Execution, batch: int) -> None:
    step = training(replace(SPEC, execution=execution, per_rank_batch_size=batch, input="fixed"))

    def step_seconds() -> float:
        return median(seconds_of(step.step, 25, GPU) for _ in range(20)) / 25

    step_seconds()  # while the clocks settle
    before = min(step_seconds() for _ in range(3))
    assert kernel_names(step.step, GPU)
    after = min(step_seconds() for _ in range(3))  # eager steps vary with the CPU's launches
    assert after == pytest.approx(before, rel=0.02)


@pytest.mark.slow
def test_fresh_processes_of_two_pools_have_equal_digests() -> None:
    digests: dict[str, list[str]] = {"graph": [], "eager": []}
    for _ in range(2):
        with Pool(SetOptions(size=1, device="cuda", rounds=1, deadline_seconds=120), replicates=2) as pool:
            for execution in digests:
                measured = pool.measure(replace(SPEC, execution=execution))  # type: ignore[arg-type]
                digests[execution] += [sample.kernels for sample in measured.samples]
    for of_form in digests.values():
        assert len(of_form) == 4
        assert len(set(of_form)) == 1
        assert of_form[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_ranks_are_profiled_together() -> None:
    with Pool(SetOptions(size=2, device="cuda", rounds=1, deadline_seconds=120), replicates=2) as pool:
        for execution in ("graph", "eager"):
            spec = replace(SPEC, world_size=2, strategy="ddp", execution=execution)
            one, other = pool.measure(spec).samples
            assert one.kernels == other.kernels != ""
