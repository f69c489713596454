"""A whole training by a recipe, evaluated after each epoch: what it learns, and how long that takes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddpperf import specs
from ddpperf.data.images import load_test_images
from ddpperf.data.inputs import DeviceInput
from ddpperf.instruments.timing import synchronize
from ddpperf.specs import CHECKPOINTS_VARIABLE, RunSpec
from ddpperf.training import checkpoint
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.evaluation import STATISTICS_IMAGES, Evaluation, average_buffers, recompute_statistics
from ddpperf.training.schedules import scheduled_rates
from ddpperf.training.strategies import require_equal_parameters
from ddpperf.training.task import MEMORY_FORMATS, data_path, epoch_batches

Epoch = dict[str, float]


class TrainingRun(TrainingEpoch):
    """`step` is the whole run, from the parameters that the seed gives, or from a checkpoint.

    history: of each epoch that was trained its losses, accuracies and seconds.
    """

    spec: RunSpec

    def __init__(self, spec: RunSpec, *, rank: int, device: torch.device) -> None:
        self.rank = rank
        super().__init__(spec, rank=rank, device=device)
        self.loss_of = partial(F.cross_entropy, label_smoothing=spec.label_smoothing)
        memory_format = MEMORY_FORMATS[spec.memory_format]
        images = load_test_images(data_path(spec), spec.test_images)
        self.evaluation = Evaluation(
            images, rank=rank, world_size=spec.world_size, device=device, memory_format=memory_format
        )
        if spec.clip_norm:
            self.before_update = partial(
                torch.nn.utils.clip_grad_norm_, list(self.model.parameters()), spec.clip_norm
            )
        self.losses = torch.zeros(spec.steps, device=device)  # of each step, without smoothing
        self.plain_loss = torch.zeros((), device=device)  # of the step that is trained with smoothing
        self.right = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # images of an epoch, as they were trained on
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # of the step
        self.start = {name: value.clone() for name, value in self.inner.state_dict().items()}
        self.runs: dict[
            int, tuple[Any, ...]
        ] = {}  # by batch size: the input, what takes a batch, and what runs a step
        self.history: list[Epoch] = []
        self.resumed_epochs = 0
        self.rounds = 0
        self.running = False  # for good, and not to warm up

    def rates(self) -> list[float]:
        return scheduled_rates(
            self.spec.schedule,
            self.spec.rate,
            steps=self.spec.steps,
            warm_up=self.spec.steps_before(self.spec.warmup_epochs),
        )

    # --- a step

    def begin_epoch(self) -> None:
        """Within the run the rates go on from epoch to epoch."""
        self.input.begin(self.epoch)
        self.epoch += 1
        if not self.running:
            self.schedule.begin()
            self.number.zero_()

    def train(self) -> None:
        if self.spec.label_smoothing:
            self.plain_loss.zero_()
        super().train()
        loss = self.plain_loss / self.spec.accumulation_steps if self.spec.label_smoothing else self.loss
        self.losses.index_copy_(0, self.number, loss.view(1))
        self.number.add_(1)

    def loss_on(self, inputs: Any, targets: Tensor) -> Tensor:
        with self.autocast():
            outputs = self.model(inputs)
            self.right.add_((outputs.detach().argmax(1) == targets).sum())
            loss: Tensor = self.loss_of(outputs, targets)
            if self.spec.label_smoothing:
                self.plain_loss.add_(F.cross_entropy(outputs.detach(), targets))
        return loss

    # --- starting

    def warm_up(self, steps: int) -> None:
        """Train a little with each size of batch, capture what is to be replayed, and forget what was learned."""
        for batch_size in dict.fromkeys(self.spec.batch_sizes):
            spec = self.spec.of_batches(batch_size)
            if not self.runs and batch_size == self.spec.per_rank_batch_size:
                input_of_size = self.input
            else:
                assert isinstance(self.input, DeviceInput)
                input_of_size = self.input.of_batches(epoch_batches(spec, self.rank))
            if input_of_size is not self.input:
                self.input, self.take = input_of_size, input_of_size.take
            self.place = self.epoch = 0
            super(TrainingEpoch, self).warm_up(min(steps, spec.steps_per_epoch))
            self.runs[batch_size] = self.input, self.take, self.run
            self.run = self.train

    def restart(self) -> None:
        """Everything as it was before the first step, at the same addresses."""
        self.inner.load_state_dict(self.start)
        with torch.no_grad():
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            self.losses.zero_()
        self.history = []
        self.resumed_epochs = 0
        self.go_to(0)

    def go_to(self, epoch: int) -> None:
        self.epoch = epoch
        self.place = 0
        done = self.spec.steps_before(epoch)
        self.schedule.begin(done)
        self.number.fill_(done)

    # --- the run

    def step(self) -> None:
        """From a checkpoint only the first time: a round that is repeated has to last as long as a run."""
        self.running = True
        self.restart()
        if not self.rounds:
            self.resume()
        self.rounds += 1
        for epoch in range(len(self.history), self.spec.epochs):
            self.history.append(self.trained_epoch(epoch))
            self.keep()
        self.running = False

    def trained_epoch(self, epoch: int) -> Epoch:
        synchronize(self.device)
        began = time.perf_counter()
        batch_size, steps = self.spec.batch_sizes[epoch], self.spec.epoch_steps[epoch]
        self.input, self.take, self.run = self.runs[batch_size]
        self.right.zero_()
        self.place = 0
        torch.manual_seed(
            Random(f"{self.spec.seed} {self.rank} {epoch}").getrandbits(32)
        )  # dropout's, wherever it began
        self.begin_epoch()
        for _ in self.reported(steps, lambda share: self.done(epoch + share)):
            self.input.load()
            self.run()
        if epoch + 1 < self.spec.epochs:
            self.runs[self.spec.batch_sizes[epoch + 1]][0].prepare(self.epoch)
        trained = self.require_finite(epoch)
        synchronize(self.device)
        seconds = time.perf_counter() - began
        test_loss, test_accuracy = self.evaluated(epoch)
        if not math.isfinite(test_loss):
            raise FloatingPointError(
                f"the loss on the test images is {test_loss} after epoch {epoch + 1}; use a smaller rate"
            )
        self.report(self.done(epoch + 1))
        return {
            **trained,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "train_seconds": seconds,
            "epoch_seconds": time.perf_counter() - began,
        }

    def done(self, epochs: float) -> float:
        """The share of what was left to do when it began."""
        return (epochs - self.resumed_epochs) / (self.spec.epochs - self.resumed_epochs)

    def require_finite(self, epoch: int) -> Epoch:
        """The epoch's loss and accuracy on what was trained on; raises FloatingPointError, on every rank, if a step's loss was
        no number on any."""
        first, steps = self.spec.steps_before(epoch), self.spec.epoch_steps[epoch]
        found = torch.cat([self.losses[first : first + steps].double(), self.right.double().view(1)])
        if self.spec.grouped:
            dist.all_reduce(found)
        *losses, right = (found / self.spec.processes).tolist()
        for number, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {loss} in epoch {epoch + 1}, step {number + 1} of {steps}; use a smaller rate, or a warm-up"
                )
        return {
            "train_loss": math.fsum(losses) / steps,
            "train_accuracy": right / (steps * self.spec.batch_sizes[epoch]),
        }

    def evaluated(self, epoch: int) -> tuple[float, float]:
        if self.spec.recompute_statistics:
            recompute_statistics(self.inner, self.fresh_batches(epoch), self.autocast)
        if self.spec.grouped:
            average_buffers(self.inner, self.spec.world_size)
        return self.evaluation(self.inner, self.autocast)

    def fresh_batches(self, epoch: int) -> Iterator[Tensor]:
        """As they were trained on, in the coming epoch's order."""
        self.input.begin(self.epoch)
        images = self.spec.world_size * self.spec.batch_sizes[epoch]
        for _ in range(min(self.spec.epoch_steps[epoch], -(-STATISTICS_IMAGES // images))):
            self.input.load()
            yield self.input.take()[0]

    # --- checkpoints

    @property
    def checkpoint_path(self) -> Path | None:
        folder = os.environ.get(CHECKPOINTS_VARIABLE)
        return Path(folder, f"{self.spec.id.replace(':', '_')}.pt") if folder else None

    def keep(self) -> None:
        """Rank 0's state is all ranks', for their buffers were averaged."""
        if self.checkpoint_path is not None and self.rank == 0:
            state = {**checkpoint.state_of(self.inner, self.optimizer), "history": self.history}
            checkpoint.save(self.checkpoint_path, specs.to_json(self.spec), state)

    def resume(self) -> None:
        path, spec = self.checkpoint_path, specs.to_json(self.spec)
        if path is None or (state := checkpoint.load(path, spec, self.device)) is None:
            return
        checkpoint.restore(path, state, self.inner, self.optimizer)
        self.history = list(state["history"])
        self.resumed_epochs = len(self.history)
        self.go_to(self.resumed_epochs)

    def end_round(self, steps: int) -> None:
        """Each epoch was checked."""

    def finish(self) -> dict[str, float]:
        """Each epoch's losses, accuracies and seconds, as train_loss_1 and so on; resumed_epochs: those of an earlier run.
        Raises RuntimeError if the ranks' parameters differ."""
        if self.spec.grouped:
            require_equal_parameters(self.model)
        counters = {
            f"{name}_{number}": value
            for number, each in enumerate(self.history, 1)
            for name, value in each.items()
        }
        return counters | {"resumed_epochs": float(self.resumed_epochs)}
