"""The figures that every experiment with a training step derives from it."""

from __future__ import annotations

from ddpperf.plugin.measure import Measure
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, TrainingSpec
from ddpperf.verdict.stored_run import is_launch_bound

FEWEST_STEPS = 8  # of an epoch: of fewer, most rounds' steps would wait for the next epoch's order
COUNTED = ("peak_memory_bytes", "cpu_seconds", "communicator_seconds", "compile_seconds", "capture_seconds")


def training_metrics(measure: Measure, step: Measured) -> None:
    """Images per second, seconds of a step and of an epoch, and what the ranks counted: memory, gradients, the CPU's part,
    and the seconds before the first step that counts."""
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
        measure.warn(f"an epoch has fewer than {FEWEST_STEPS} steps, and its beginning is timed with them")
    if is_launch_bound(step):
        measure.warn("the CPU's launches bound it, not the GPU")


def speedup_over(measure: Measure, name: str, step: Measured, other: TrainingSpec) -> None:
    """How many times faster a step is than the other."""
    beside = measure.reference(name, other).median_step_seconds()
    measure.metric(
        f"speedup_over_{name}",
        {each: beside[each] / t for each, t in step.median_step_seconds().items()},
    )
