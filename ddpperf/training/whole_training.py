"""Train a model over several epochs by a training recipe, with an evaluation after each epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.data.images import load_images
from ddpperf.data.inputs import DeviceInput
from ddpperf.data.sampler import EpochBatches
from ddpperf.measuring.clock import synchronize
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import RunSpec
from ddpperf.training.evaluation import AveragedWeights, Evaluation, average_buffers
from ddpperf.training.measured_step import CAPTURE_WARMUP, MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import require_equal_parameters

Epoch = dict[str, float]
STATISTICS_IMAGES = 4096  # over all ranks, for recomputing BatchNorm's statistics


class StepRecord:
    """The loss of each training step, and the number of training images classified correctly.

    The loss is without label smoothing. In fp16, the steps are counted that changed no parameter
    because a scaled gradient overflowed. All values are on the device, so that a CUDA graph of a
    step updates them.
    """

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self.spec = spec
        # The warm-up for a capture may have more steps than the training.
        self.losses = torch.zeros(max(sum(spec.epoch_steps), CAPTURE_WARMUP), device=device)
        self.plain_loss = torch.zeros((), device=device)  # the current step's loss without label smoothing
        self.right = torch.tensor(0, device=device)  # correctly classified images of an epoch
        self.skipped = torch.tensor(0, device=device)  # steps of an epoch whose gradients overflowed
        self.one = torch.ones((), device=device)
        self.number = torch.tensor([0], device=device)  # the number of the step

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.ndim == 2:  # CutMix's probabilities of the classes; a model may have more outputs
            self.right.add_((outputs.detach().argmax(1) == targets.argmax(1)).sum())
            targets = F.pad(targets, (0, outputs.shape[1] - targets.shape[1]))
        else:
            self.right.add_((outputs.detach().argmax(1) == targets).sum())
        loss = F.cross_entropy(outputs, targets, label_smoothing=self.spec.label_smoothing)
        if self.spec.label_smoothing:
            self.plain_loss.add_(F.cross_entropy(outputs.detach(), targets))
        return loss

    def train(self, training: TrainingStep) -> None:
        """Make one training step, and record its loss on the device."""
        if self.spec.label_smoothing:
            self.plain_loss.zero_()
        scaler = training.scaler
        scale = scaler.scale(self.one)
        training.train()
        if scaler.is_enabled():  # a skipped step makes the scale smaller, and no other step does
            self.skipped.add_(scaler.scale(self.one) < scale)
        loss = training.loss
        if self.spec.label_smoothing:
            loss = self.plain_loss / self.spec.accumulation_steps
        self.losses.index_copy_(0, self.number, loss.view(1))
        self.number.add_(1)

    def of_epoch(self, epoch: int) -> Epoch:
        """Return the mean loss and the accuracy on the training images in one epoch.

        In fp16, the number of skipped steps is returned, too. If a step's loss is NaN or infinite on
        any rank, there is no loss. Then every rank raises FloatingPointError, unless the spec says
        that the training may diverge.
        """
        spec = self.spec
        first, steps = sum(spec.epoch_steps[:epoch]), spec.epoch_steps[epoch]
        counts = torch.stack([self.right, self.skipped]).double()
        sums = torch.cat([self.losses[first : first + steps].double(), counts])
        if spec.grouped:
            dist.all_reduce(sums)
        *losses, right, skipped = (sums / spec.processes).tolist()
        for number, loss in enumerate(losses):
            if not math.isfinite(loss) and not spec.may_diverge:
                where = f"in epoch {epoch + 1}, step {number + 1} of {steps}"
                advice = "use a smaller learning rate, or a warm-up"
                raise FloatingPointError(f"the loss is {loss} {where}; {advice}")
        found = {"train_accuracy": right / (steps * spec.batch_sizes[epoch])}
        if all(map(math.isfinite, losses)):
            found["train_loss"] = math.fsum(losses) / steps
        return found | ({"skipped_steps": skipped} if spec.precision == "fp16" else {})


class TrainingRun(Measurement):
    """Measurement in which each step trains a model over all epochs of a training spec.

    Each training begins with the initial parameters.
    after_step: called after each training step with the fraction of the training that is done.
    history: losses, accuracies and seconds of each epoch.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        rank: int,
        device: torch.device,
        after_step: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.spec, self.rank, self.after_step = spec, rank, after_step
        self.record = StepRecord(spec, device)
        self.training = TrainingStep(spec, rank=rank, device=device, loss=self.record.loss)
        self.evaluation = Evaluation(load_images(spec, "test"), spec, rank, device)
        self.start = {name: value.clone() for name, value in self.training.module.state_dict().items()}
        self.start_scaler = self.training.scaler.state_dict()  # empty except in fp16
        self.steps = {size: self._step_of(size) for size in dict.fromkeys(spec.batch_sizes)}
        self.averaged = AveragedWeights(self.training.module) if spec.average_weights else None
        self.history: list[Epoch] = []

    def _step_of(self, batch_size: int) -> MeasuredStep:
        training = self.training
        if batch_size != self.spec.per_rank_batch_size:
            assert isinstance(training.input, DeviceInput)
            batches = EpochBatches(self.spec.of_batches(batch_size), self.rank)
            training = training.with_input(DeviceInput(training.input.images, batches))
        return MeasuredStep(training, train=partial(self.record.train, training))

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated: the averaged weights if the spec says so."""
        return self.averaged.module if self.averaged is not None else self.training.module

    def warm_up(self, steps: int) -> None:
        """Run warm-up steps with each batch size, and capture CUDA graphs if the spec says so."""
        for batch_size, step in self.steps.items():
            self.record.number.zero_()
            step.warm_up(min(steps, self.spec.of_batches(batch_size).steps_per_epoch))

    def step(self) -> None:
        """Train the model over all epochs."""
        self._restart()
        for epoch in range(self.spec.epochs):
            self.history.append(self._train_epoch(epoch))

    def _restart(self) -> None:
        """Reset the parameters, the optimizer, fp16's scaler and the records, in place.

        A CUDA graph uses the addresses of the tensors.
        """
        self.training.module.load_state_dict(self.start)
        with torch.no_grad():
            for state in self.training.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            self.record.losses.zero_()
        self.training.scaler.load_state_dict(self.start_scaler)
        self.history = []
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Reset the schedule and the step counters, so that the next step is the first of a training."""
        self.training.schedule.begin()
        self.record.number.zero_()
        if self.averaged is not None:
            self.averaged.steps = 0

    def _train_epoch(self, epoch: int) -> Epoch:
        spec, device = self.spec, self.training.device
        synchronize(device)
        began = time.perf_counter()
        step = self.steps[spec.batch_sizes[epoch]]
        self.record.right.zero_()
        self.record.skipped.zero_()
        # Dropout is the same in each repetition of the training.
        torch.manual_seed(Random(f"{spec.seed} {self.rank} {epoch}").getrandbits(32))
        step.training.input.begin(epoch)
        steps = spec.epoch_steps[epoch]
        for number in range(1, steps + 1):
            step.train_batch()
            if self.averaged is not None:
                self.averaged.update()
            self.after_step((epoch + number / steps) / spec.epochs)
        if epoch + 1 < spec.epochs:
            self.steps[spec.batch_sizes[epoch + 1]].training.input.prepare(epoch + 1)
        trained = self.record.of_epoch(epoch)
        synchronize(device)
        seconds = time.perf_counter() - began
        module, autocast = self.evaluated, self.training.autocast
        if spec.recompute_statistics:
            # After a few dozen steps the running statistics are still far from those of the parameters.
            with autocast():
                torch.optim.swa_utils.update_bn(self._next_batches(epoch), module)
        if spec.grouped:
            average_buffers(module, spec.world_size)
        test_loss, test_accuracy = self.evaluation(module, autocast)
        tested = {"test_accuracy": test_accuracy, "train_seconds": seconds}
        if math.isfinite(test_loss):
            tested["test_loss"] = test_loss
        elif not spec.may_diverge:
            what = f"the loss on the test images is {test_loss} after epoch {epoch + 1}"
            raise FloatingPointError(f"{what}; use a smaller learning rate")
        return {**trained, **tested, "epoch_seconds": time.perf_counter() - began}

    def _next_batches(self, epoch: int) -> Iterator[Tensor]:
        """Yield training images, in batches, to recompute BatchNorm's statistics before evaluation.

        The images come in the order of the next epoch, in batches of this epoch's size.
        """
        training = self.steps[self.spec.batch_sizes[epoch]].training
        training.input.begin(epoch + 1)
        images = self.spec.world_size * self.spec.batch_sizes[epoch]
        for _ in range(min(self.spec.epoch_steps[epoch], -(-STATISTICS_IMAGES // images))):
            training.input.load()
            yield training.input.take()[0]

    def finish(self) -> dict[str, float]:
        """Return the losses, accuracies and seconds of each epoch by name, such as train_loss_1.

        mirrored_test_accuracy: the test accuracy after the last epoch by the mean of the outputs for
        each image and its mirror image. It is computed here, so that the time of a training is
        without it. Raises RuntimeError if the ranks' parameters differ.
        """
        if self.spec.grouped:
            require_equal_parameters(self.training.module, self.spec)
        self._begin_steps()  # a later step, made to list its kernels, needs a place in the record
        counters: dict[str, float] = {}
        for number, epoch in enumerate(self.history, 1):
            counters |= {f"{name}_{number}": value for name, value in epoch.items()}
        if self.history:
            evaluated = self.evaluation(self.evaluated, self.training.autocast, mirrored=True)
            counters["mirrored_test_accuracy"] = evaluated[1]
        return counters
