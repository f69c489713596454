"""Functions that store the metrics of a measured training step, shared by all experiments."""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub, truediv
from statistics import mean

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, RunSpec, TrainingSpec
from ddpperf.verdict.noise_classes import is_launch_bound
from perf.common.by_set import per_set

FEWEST_STEPS = 8  # in a shorter epoch, most rounds wait for the shuffling of the next epoch
COUNTED = ("peak_memory_bytes", "cpu_seconds", "communicator_seconds", "compile_seconds", "capture_seconds")


def training_metrics(measure: Measure, step: Measured) -> None:
    """Store a training step's throughput, its epoch time, and the counters of its ranks.

    Throughput and epoch time follow from the mean step, which has its stalls. Of measured epochs, the
    median counts. The ranks count peak memory, CPU seconds, gradient bytes, and the time to compile
    and capture.
    """
    spec = step.spec
    assert isinstance(spec, TrainingSpec)
    whole = isinstance(spec, EpochSpec)
    seconds = step.median_step_seconds() if whole else step.mean_step_seconds()
    steps, images = spec.steps_per_epoch, spec.images_per_epoch
    epoch = seconds if whole else per_set(lambda t: steps * t, seconds)
    if whole:
        measure.metric("step_seconds", per_set(lambda t: t / steps, epoch))
    else:
        measure.metric("epoch_seconds", epoch)
    measure.metric("images_per_second", per_set(lambda t: images / t, epoch))
    if gradients := step.counter("gradient_bytes"):
        measure.metric("communicated_bytes_per_epoch", per_set(lambda nbytes: steps * nbytes, gradients))
    if bound := step.launch_bound():
        measure.metric("launch_bound", bound)
    for name in COUNTED:
        if by_set := step.counter(name):
            measure.metric(name, by_set)
    usage_metrics(measure, step)
    if not whole and spec.input == "device" and spec.steps_per_epoch < FEWEST_STEPS:
        measure.warn(f"an epoch has fewer than {FEWEST_STEPS} steps, so how it starts affects the step times")
    if is_launch_bound(step):
        measure.warn("the step waits for kernel launches on the CPU, not for the GPU")


def cost_metrics(
    measure: Measure, T1: Mapping[str, float], TN: Mapping[str, float], N: int, *, of: str = "per_epoch"
) -> None:
    """Store the device time of an epoch or a training on N devices, compared with one device.

    On several devices, the time saved and its price, the extra device time, are stored, too.
    T1, TN: the seconds for the same images on one device and on N devices, by process set. of:
    "per_epoch" or "of_training".
    """
    measure.metric(f"device_seconds_{of}", per_set(lambda TN: N * TN, TN))
    if N > 1:
        measure.metric(f"saved_seconds_{of}", per_set(sub, T1, TN))
        measure.metric(f"extra_device_seconds_{of}", per_set(lambda T1, TN: N * TN - T1, T1, TN))


def usage_metrics(measure: Measure, measured: Measured) -> None:
    """Store the mean and peak utilization of a training and its energy, as far as they are known.

    A mean is the mean over all GPUs or ranks. A peak is that of any GPU or rank. The energy is that of
    all GPUs together, for a step and an epoch.
    """
    usages = {sample.set: sample.usage for sample in measured.samples if sample.usage is not None}
    by_name: dict[str, dict[str, float]] = {}
    for process_set, usage in usages.items():
        for ending, combine, rows in (("mean", mean, usage.mean), ("peak", max, usage.peak)):
            for quantity, row in rows.items():
                if known := [value for value in row if value is not None]:
                    by_name.setdefault(f"{quantity}_{ending}", {})[process_set] = combine(known)
    for name, by_set in by_name.items():
        measure.metric(name, by_set)
    spec = measured.spec
    assert isinstance(spec, TrainingSpec)
    if isinstance(spec, RunSpec):
        epochs, steps, images = float(spec.epochs), float(sum(spec.epoch_steps)), float(spec.images)
    else:
        epochs = 1.0 if isinstance(spec, EpochSpec) else 1 / spec.steps_per_epoch
        steps, images = epochs * spec.steps_per_epoch, epochs * spec.images_per_epoch
    if joules := {name: sum(usage.joules) for name, usage in usages.items() if sum(usage.joules) > 0}:
        measure.metric("joules_per_step", per_set(lambda used: used / steps, joules))
        measure.metric("joules_per_epoch", per_set(lambda used: used / epochs, joules))
        measure.metric("images_per_joule", per_set(lambda used: images / used, joules))


def speedup_over(measure: Measure, name: str, step: Measured, other: TrainingSpec) -> None:
    """Store the speedup of a training step over the step of another training spec.

    name: the metric is called speedup_over_NAME.
    """
    seconds = measure.reference(name, other).median_step_seconds()
    measure.metric(f"speedup_over_{name}", per_set(truediv, seconds, step.median_step_seconds()))
