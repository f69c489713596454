"""Metrics that every experiment with a training step stores, and their warnings."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, TrainingSpec
from perf.common.step_metrics import FEWEST_STEPS, speedup_over, training_metrics
from perf.test_scaling import scaling_metrics
from tests.fake_measure import FakeMeasure

BATCH = 4
BOUND = "the step waits for kernel launches on the CPU, not for the GPU"
START = f"an epoch has fewer than {FEWEST_STEPS} steps, so its start is part of the times"


class OneReference(FakeMeasure):
    """A `measure` fixture that has one reference."""

    def __init__(self, found: Measured) -> None:
        super().__init__()
        self.found = found

    def reference(self, name: str, spec: Any) -> Measured:
        assert (name, spec) == ("eager", self.found.spec)
        return self.found


def measured(spec: TrainingSpec, seconds: float = 2.0, **counters: float) -> Measured:
    by_rank: dict[str, tuple[float, ...]] = {name: (value,) for name, value in counters.items()}
    sample = Sample(set="A1", side="A", torch="2.11", seconds=((seconds,),), counters=by_rank)
    return Measured(spec=spec, iterations=1, samples=(sample,))


def step(kind: type[TrainingSpec] = TrainingSpec, steps: int = FEWEST_STEPS, **fields: Any) -> TrainingSpec:
    return kind(
        world_size=1, per_rank_batch_size=BATCH, strategy="single", epoch_images=BATCH * steps, **fields
    )


@pytest.mark.parametrize(
    ("spec", "warnings"),
    [
        (step(input="device"), []),
        (step(input="device", steps=FEWEST_STEPS - 1), [START]),
        (step(input="fixed", steps=1), []),
        (step(EpochSpec, input="device", steps=1), []),
    ],
)
def test_short_epochs_from_the_device_are_a_warning(spec: TrainingSpec, warnings: list[str]) -> None:
    measure: Any = FakeMeasure()
    training_metrics(measure, measured(spec))
    assert measure.warnings == warnings


@pytest.mark.parametrize(("device_seconds", "bound", "warnings"), [(1.0, 2.0, [BOUND]), (1.95, 2 / 1.95, [])])
def test_launch_bound_step_is_a_warning(device_seconds: float, bound: float, warnings: list[str]) -> None:
    measure: Any = FakeMeasure()
    training_metrics(measure, measured(step(), device_seconds=device_seconds, cpu_seconds=0.5))
    assert measure.warnings == warnings
    assert measure.metrics["launch_bound"] == {"A1": pytest.approx(bound)}
    assert measure.metrics["cpu_seconds"] == {"A1": 0.5}


def test_speedup_over_another_step() -> None:
    measure: Any = OneReference(measured(step(), seconds=6.0))
    speedup_over(measure, "eager", measured(step(execution="compile"), seconds=2.0), step())
    assert measure.metrics == {"speedup_over_eager": {"A1": 3.0}}


def test_data_parallel_is_compared_with_ddp() -> None:
    """DataParallel takes 6 s, the DDP step of the same batch 2 s, and one device 4 s."""
    fields: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": BATCH, "epoch_images": 2 * BATCH}
    spec = TrainingSpec(strategy="data_parallel", **fields)
    seconds = {"data_parallel": 6.0, "ddp": 2.0, "single": 4.0}

    def samples(spec: TrainingSpec) -> list[Sample]:
        return [Sample(set="A1", side="A", torch="2.11", seconds=((seconds[spec.strategy],) * 2,))]

    measure: Any = FakeMeasure(samples)
    scaling_metrics(measure, spec, spec.one_device(), lambda t1, tN, N: N * t1 / tN)
    assert measure.metrics["ddp_over_data_parallel"] == {"A1": 3.0}
    assert measure.metrics["speedup"] == {"A1": pytest.approx(2 * 4 / 6)}
    ddp: Any = FakeMeasure(samples)
    scaling_metrics(ddp, spec.ddp(), spec.one_device(), lambda t1, tN, N: N * t1 / tN)
    assert "ddp_over_data_parallel" not in ddp.metrics
