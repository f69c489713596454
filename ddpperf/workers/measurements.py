"""Build the measurement that a measurement spec describes, which a rank repeats and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddpperf import specs
from ddpperf.collectives.calls import AllReduce, Collective, custom_collective
from ddpperf.data.sampler import Sampling
from ddpperf.instruments.bucket_replay import BucketReplay
from ddpperf.instruments.counted_steps import CountedSteps
from ddpperf.instruments.data_parallel_trace import TracedDataParallel
from ddpperf.instruments.memory_copy import Copy
from ddpperf.instruments.step_parts import PartedSteps, PartMarks
from ddpperf.instruments.traced_steps import TracedSteps
from ddpperf.measuring.clock import delayed
from ddpperf.measuring.message_ledger import Ledger
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import Spec
from ddpperf.training.custom_step import CustomStep
from ddpperf.training.data_parallel import training_step
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep, sent_bytes
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import bucket_messages, gradient_bytes
from ddpperf.training.whole_training import TrainingRun

KINDS: dict[type[Spec], Callable[..., Measurement]] = {
    specs.AllReduceSpec: AllReduce,
    specs.CollectiveSpec: Collective,
    specs.CopySpec: Copy,
    specs.SamplerSpec: Sampling,
    specs.CustomStepSpec: CustomStep,
    specs.CustomCollectiveSpec: custom_collective,
}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A measurement that a rank has built, and the function that runs its timed step.

    step: includes the delay of the measurement spec. training: None if the measurement does not
    train.
    """

    spec: Spec
    measurement: Measurement
    step: Callable[[], None]
    training: MeasuredStep | None = None

    def close(self) -> None:
        """Free the memory and the processes of a measurement at once.

        A data loader that waits for the garbage collector may hang.
        """
        held: list[object] = [self.measurement]
        if self.training is not None:
            held += [self.training, self.training.training]
        for part in held:
            vars(part).clear()


def open_measurement(
    spec: Spec, *, rank: int, device: torch.device, report: Callable[[float], None]
) -> Opened:
    """Build the measurement that a measurement spec describes.

    report: called with the fraction of a long step that is done.
    """
    training: MeasuredStep | None = None
    measurement: Measurement
    if isinstance(spec, specs.EpochSpec | specs.RunSpec):
        # The delay is in every training step: a rank that is silent during a long delay counts as hung.
        delay = delayed(lambda: None, spec.delay_seconds, device)
        if isinstance(spec, specs.RunSpec):
            run = TrainingRun(spec, rank=rank, device=device, after_step=delay, report=report)
            return Opened(spec=spec, measurement=run, step=run.step, training=run.last_step)
        steps, training = _training(spec, rank, device)
        epoch = TrainingEpoch(training, steps=steps, after_step=delay, report=report)
        return Opened(spec=spec, measurement=epoch, step=epoch.step, training=training)
    if isinstance(spec, specs.BucketReplaySpec):
        measurement = BucketReplay(spec, bucket_messages(spec, rank, device), rank=rank, device=device)
    elif isinstance(spec, specs.TrainingSpec):
        measurement, training = _training(spec, rank, device)
    else:
        measurement = KINDS[type(spec)](spec, rank=rank, device=device)
    step = delayed(measurement.step, spec.calls * spec.delay_seconds, device)
    return Opened(spec=spec, measurement=measurement, step=step, training=training)


def _training(spec: specs.TrainingSpec, rank: int, device: torch.device) -> tuple[Measurement, MeasuredStep]:
    """Build training steps, and the measurement that runs and observes them."""
    if isinstance(spec, specs.PartsSpec):
        marks = PartMarks(device)
        training = MeasuredStep(TrainingStep(spec, rank=rank, device=device, enter=marks.enter_part))
        return PartedSteps(training, marks), training
    if isinstance(spec, specs.MessagesSpec):
        with (ledger := Ledger()):
            step = TrainingStep(spec, rank=rank, device=device, enter=ledger.enter_part)
        training = MeasuredStep(step)
        sizes = {"parameter_bytes": float(gradient_bytes(step.task.module)), **sent_bytes(step)}
        return CountedSteps(training, ledger, sizes), training
    training = MeasuredStep(training_step(spec, rank=rank, device=device))
    if not isinstance(spec, specs.TraceSpec):
        return training, training
    traced = TracedDataParallel if spec.strategy == "data_parallel" else TracedSteps
    return traced(training), training
