"""Metrics of training steps, and the device time of epochs and trainings on several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, RunSpec, TrainingSpec
from perf import test_large_batch, test_scaling
from perf.common.recipes import find_recipe
from perf.common.step_metrics import FEWEST_STEPS, training_metrics
from perf.test_scaling import scaling_metrics
from tests.fake_measure import FakeMeasure

BATCH = 4
BOUND = "the step waits for kernel launches on the CPU, not for the GPU"
START = f"an epoch has fewer than {FEWEST_STEPS} steps, so how it starts affects the step times"


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


def test_epoch_has_the_stalls_of_its_steps() -> None:
    """One of four steps stalls for 8 s."""
    seconds = tuple((t,) for t in (2.0, 2.0, 10.0, 2.0))
    stalled = Sample(set="A1", side="A", torch="2.11", seconds=seconds)
    for kind, step_seconds, mean_seconds in ((TrainingSpec, 4.0, 4.0), (EpochSpec, 2.0 / FEWEST_STEPS, None)):
        measure: Any = FakeMeasure()
        training_metrics(measure, Measured(spec=step(kind), iterations=1, samples=(stalled,)))
        throughput = measure.metrics["images_per_second"]
        assert throughput == {"A1": pytest.approx(BATCH / step_seconds)}
        epoch = mean_seconds and {"A1": FEWEST_STEPS * mean_seconds}
        assert measure.metrics.get("epoch_seconds") == epoch


@pytest.mark.parametrize(("device_seconds", "bound", "warnings"), [(1.0, 2.0, [BOUND]), (1.95, 2 / 1.95, [])])
def test_launch_bound_step_is_a_warning(device_seconds: float, bound: float, warnings: list[str]) -> None:
    measure: Any = FakeMeasure()
    training_metrics(measure, measured(step(), device_seconds=device_seconds, cpu_seconds=0.5))
    assert measure.warnings == warnings
    assert measure.metrics["launch_bound"] == {"A1": pytest.approx(bound)}
    assert measure.metrics["cpu_seconds"] == {"A1": 0.5}


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


# --- device time


class Costs(FakeMeasure):
    """A `measure` fixture. seconds: of an epoch with this spec."""

    def __init__(self, seconds: Callable[[TrainingSpec], float]) -> None:
        super().__init__(lambda spec: [sample_of(spec, seconds(spec))], Machine(device="cuda"))

    def metric(self, name: str, by_set: Mapping[str, float]) -> None:
        self.metrics[name] = {"by_set": dict(by_set)}

    def costs(self, suffix: str) -> list[float | None]:
        assert self.warnings == []
        names = (f"{name}_seconds_{suffix}" for name in ("device", "saved", "extra_device"))
        return [self.metrics[name]["by_set"]["A1"] if name in self.metrics else None for name in names]


def sample_of(spec: TrainingSpec, seconds: float) -> Sample:
    counters: dict[str, tuple[float, ...]] = {}
    if isinstance(spec, RunSpec):
        counters["mirrored_test_accuracy"] = (0.5, 0.5)
        figures = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "skipped_steps")
        for epoch in range(1, spec.epochs + 1):
            counters |= {f"{name}_{epoch}": (0.5, 0.5) for name in figures}
            counters[f"train_seconds_{epoch}"] = (seconds, seconds / 2)
    return Sample(set="A1", side="A", torch="2", seconds=((seconds, seconds),), counters=counters)


def test_epoch_costs_what_all_devices_take() -> None:
    """Two ranks drop one image of 65, so one device takes 10 s for 65 images and 9.846 s for 64."""
    fields: dict[str, Any] = {"per_rank_batch_size": 1, "model": "resnet18_cifar", "input": "fixed"}
    spec = EpochSpec(world_size=2, strategy="ddp", epoch_images=65, **fields)
    measure: Any = Costs(lambda spec: 10.0 if spec.world_size == 1 else 6.0)
    test_scaling.test_epoch_scaling(measure, spec)
    one = 10.0 * 64 / 65
    assert measure.costs("per_epoch") == pytest.approx([12.0, one - 6.0, 12.0 - one])


def test_one_device_is_the_slowest_one() -> None:
    """The first device alone takes 10 s for an epoch, and 2 s for a step that takes the other one 3 s."""
    fields: dict[str, Any] = {"per_rank_batch_size": 1, "model": "resnet18_cifar", "epoch_images": 64}

    def samples(spec: TrainingSpec) -> list[Sample]:
        seconds: tuple[float, ...] = (2.0, 3.0) if type(spec) is TrainingSpec else (10.0, 10.0)
        if spec.world_size == 1 and isinstance(spec, EpochSpec):
            seconds = (10.0,)
        return [Sample(set="A1", side="A", torch="2.11", seconds=(seconds,))]

    spec = EpochSpec(world_size=2, strategy="ddp", input="device", **fields)
    measure: Any = FakeMeasure(samples)
    scaling_metrics(measure, spec, spec.one_device(), lambda T1, TN, N: T1 / TN)
    assert measure.metrics["speedup"] == {"A1": pytest.approx(10 * 3 / 2 / 10)}


def test_epoch_on_one_device_saves_nothing() -> None:
    spec = EpochSpec(world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=64, input="fixed")
    measure: Any = Costs(lambda spec: 10.0)
    test_scaling.test_epoch_scaling(measure, spec)
    assert measure.costs("per_epoch") == [10.0, None, None]


LONG: dict[str, Any] = {"epochs": 50, "epoch_images": 64, "test_images": 8, "input": "device", "rate": 0.1}


def test_long_training_costs_what_all_devices_take() -> None:
    """50 epochs take 3 s each on one device and 2 s each on two. The slowest rank counts."""
    spec = RunSpec(world_size=2, per_rank_batch_size=4, strategy="ddp", **LONG)
    recipe = find_recipe("cuda", "50 epochs")
    measure: Any = Costs(lambda spec: 3.0 if spec.world_size == 1 else 2.0)
    test_large_batch.test_long_run(measure, spec, recipe)
    assert measure.costs("of_training") == pytest.approx([200.0, 50.0, 50.0])
    alone: Any = Costs(lambda spec: 3.0)
    test_large_batch.test_long_run(alone, measure.references["one_device, seed=0"], recipe)
    assert alone.costs("of_training") == [pytest.approx(150.0), None, None]


def test_growing_batch_grows_alike_on_one_device() -> None:
    spec = RunSpec(world_size=4, per_rank_batch_size=16, grow_from=2, strategy="ddp", **LONG)
    measure: Any = Costs(lambda spec: 1.0)
    test_large_batch.test_long_run(measure, spec, find_recipe("cuda", "50 epochs"))
    alone = measure.references["one_device, seed=0"]
    assert (alone.per_rank_batch_size, alone.grow_from, alone.world_size) == (64, 8, 1)
