"""What experiments with a training step derive from it: what is doubtful, and how much faster one step is than another."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, TrainingSpec
from perf.common.metrics import FEWEST_STEPS, speedup_over, training_metrics

BATCH = 4
BOUND = "the CPU's launches bound it, not the GPU"
BEGINNING = f"an epoch has fewer than {FEWEST_STEPS} steps, and its beginning is timed with them"


class Told:
    """Stands for the fixture: what it was told, and the leg that it gives."""

    def __init__(self, reference: Measured | None = None) -> None:
        self.metrics: dict[str, dict[str, float]] = {}
        self.warnings: list[str] = []
        self._leg = reference

    def metric(self, name: str, by_set: dict[str, float]) -> None:
        self.metrics[name] = by_set

    def warn(self, reason: str) -> None:
        self.warnings.append(reason)

    def reference(self, name: str, spec: TrainingSpec) -> Measured:
        assert self._leg is not None
        assert (name, spec) == ("eager", self._leg.spec)
        return self._leg


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
        (step(input="device", steps=FEWEST_STEPS - 1), [BEGINNING]),
        (step(input="fixed", steps=1), []),
        (step(EpochSpec, input="device", steps=1), []),
    ],
)
def test_steps_of_a_short_epoch_are_doubtful_where_beginning_it_costs_something(
    spec: TrainingSpec, warnings: list[str]
) -> None:
    told: Any = Told()
    training_metrics(told, measured(spec))
    assert told.warnings == warnings


@pytest.mark.parametrize(("device_seconds", "bound", "warnings"), [(1.0, 2.0, [BOUND]), (1.95, 2 / 1.95, [])])
def test_a_step_that_waits_for_launches_says_so(
    device_seconds: float, bound: float, warnings: list[str]
) -> None:
    told: Any = Told()
    training_metrics(told, measured(step(), device_seconds=device_seconds, cpu_seconds=0.5))
    assert told.warnings == warnings
    assert told.metrics["launch_bound"] == {"A1": pytest.approx(bound)}
    assert told.metrics["cpu_seconds"] == {"A1": 0.5}


def test_a_speedup_over_another_step_is_its_time_over_this_ones() -> None:
    told: Any = Told(reference=measured(step(), seconds=6.0))
    speedup_over(told, "eager", measured(step(execution="compile"), seconds=2.0), step())
    assert told.metrics == {"speedup_over_eager": {"A1": 3.0}}
