"""Functions that store the metrics of a measured training step, shared by all experiments."""

from __future__ import annotations

from collections.abc import Mapping

from ddpperf.analysis.breakdown import epoch_cost
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, TrainingSpec
from ddpperf.verdict.judged_work import is_launch_bound

FEWEST_STEPS = 8  # in a shorter epoch, most rounds wait for the shuffling of the next epoch
COUNTED = ("peak_memory_bytes", "cpu_seconds", "communicator_seconds", "compile_seconds", "capture_seconds")


def training_metrics(measure: Measure, step: Measured) -> None:
    """Store a training step's throughput, its epoch time, and the counters of its ranks.

    The ranks count peak memory, CPU seconds, gradient bytes, and the time to compile and capture.
    """
    spec = step.spec
    assert isinstance(spec, TrainingSpec)
    seconds = step.median_step_seconds()
    whole = isinstance(spec, EpochSpec)
    epoch = seconds if whole else {name: spec.steps_per_epoch * t for name, t in seconds.items()}
    if whole:
        measure.metric("step_seconds", {name: t / spec.steps_per_epoch for name, t in epoch.items()})
    else:
        measure.metric("epoch_seconds", epoch)
    measure.metric("images_per_second", {name: spec.images_per_epoch / t for name, t in epoch.items()})
    if gradients := step.counter("gradient_bytes"):
        communicated = {name: spec.steps_per_epoch * nbytes for name, nbytes in gradients.items()}
        measure.metric("communicated_bytes_per_epoch", communicated)
    if bound := step.launch_bound():
        measure.metric("launch_bound", bound)
    for name in COUNTED:
        if by_set := step.counter(name):
            measure.metric(name, by_set)
    if not whole and spec.input == "device" and spec.steps_per_epoch < FEWEST_STEPS:
        measure.warn(f"an epoch has fewer than {FEWEST_STEPS} steps, so its start is part of the times")
    if is_launch_bound(step):
        measure.warn("the step waits for kernel launches on the CPU, not for the GPU")


def cost_metrics(
    measure: Measure, T1: Mapping[str, float], TN: Mapping[str, float], N: int, *, of: str = "per_epoch"
) -> None:
    """Store the device time of an epoch or a training on N devices, compared with one device.

    T1, TN: the seconds on one device and on N devices, by process set. On several devices, the time
    saved and the extra device time are stored, too. of: "per_epoch" or "of_training".
    """
    costs = {name: epoch_cost(T1[name], seconds, N) for name, seconds in TN.items()}
    for field in ("device_seconds", "saved_seconds", "extra_device_seconds")[: None if N > 1 else 1]:
        measure.metric(f"{field}_{of}", {name: cost[field] for name, cost in costs.items()})


def speedup_over(measure: Measure, name: str, step: Measured, other: TrainingSpec) -> None:
    """Store the speedup of a training step over the step of another training spec.

    name: the metric is called speedup_over_NAME.
    """
    others = measure.reference(name, other).median_step_seconds()
    seconds = step.median_step_seconds()
    measure.metric(
        f"speedup_over_{name}", {set_name: others[set_name] / t for set_name, t in seconds.items()}
    )
