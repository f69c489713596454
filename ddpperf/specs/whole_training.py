"""Measurement spec for training a model over several epochs by a training recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ddpperf.specs.spec import Fraction, Positive, Rule, Rules
from ddpperf.specs.training_step import TrainingSpec

OptimizerName = Literal["sgd", "lars", "lamb", "muon"]
ScheduleName = Literal["constant", "step", "multistep", "cosine", "linear", "cyclic", "one_cycle"]
SGD_ONLY = ("nesterov", "decay_vectors")
MOST_DOUBLINGS = 30  # of the batch size


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec):
    """Measurement spec for training a model over `epochs` epochs, each followed by an evaluation.

    The learning rate rises linearly in the warm-up, and then follows the schedule. The batch size
    doubles each epoch from `grow_from` up to `per_rank_batch_size`.
    may_diverge: whether a loss that is NaN or infinite is a result instead of an error. The epochs
    with such a loss have no loss in the report.
    """

    measurement: ClassVar[str] = "training_run"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True
    rules: ClassVar[Rules] = (
        Rule(
            strategy=("single", "ddp"),
            input=("device",),
            drop_last=(True,),
            comm_hook=("none", "avg", "bf16", "fp16", "symmetric_memory"),  # PowerSGD's state cannot restart
        ),
        Rule("grow_from", execution=("eager", "graph")),  # one batch size is compiled
        *(Rule(option, optimizer=("sgd",)) for option in SGD_ONLY),
    )

    epochs: Annotated[int, 1, 100_000]
    test_images: Positive  # in each evaluation
    optimizer: OptimizerName = "sgd"
    rate: Annotated[float, 1e3]  # the highest learning rate
    momentum: Fraction = 0.9
    weight_decay: Fraction = 5e-4
    schedule: ScheduleName = "linear"
    warmup_epochs: int = 0
    label_smoothing: Fraction = 0.0  # the part of a target that is spread over all classes
    cutmix: Fraction = 0.0  # of the training images, in which a rectangle shows another image
    crop_padding: Annotated[int, 0, 64] = 4  # pixels around a training image before its random crop
    uncropped_epochs: int = 0  # the number of last epochs without random crops
    clip_norm: Annotated[float, 1e6] = 0.0  # the largest norm of all gradients together; 0 for no limit
    grow_from: int = 0  # the per-rank batch size of the first epoch; 0 for a constant batch size
    recompute_statistics: bool = False  # of BatchNorm, before each evaluation
    nesterov: bool = True  # SGD's momentum
    decay_vectors: bool = False  # whether SGD's weight decay also holds for biases and normalizations
    may_diverge: bool = False
    average_weights: bool = False  # whether the evaluated weights are an average over the last steps
    set_epoch: bool = True  # type: ignore[misc]  # whether each epoch is shuffled differently
    seed: int = 0  # type: ignore[misc]  # of the parameters, the order of the images and the crops

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        batch, images, grow_from = self.per_rank_batch_size, self.shard.images, self.grow_from
        for name in ("warmup_epochs", "uncropped_epochs"):
            if (epochs := getattr(self, name)) > self.epochs:
                yield f"{name}={epochs} is more than the {self.epochs} epochs of the run; use less"
        if grow_from > batch:
            yield f"grow_from={grow_from} is more than a batch of {batch}; use less"
        if batch > images:
            found = f"a batch of {batch} images per rank is more than its {images} images of an epoch"
            yield f"{found}; use a smaller one"
        if self.captured and self.precision == "fp16" and self.optimizer != "sgd":
            yield f"execution {self.execution} cannot capture {self.optimizer} with fp16's scaler; use bf16"
        if not self.rate:
            yield "rate must be more than 0, got 0"
        if not 0 < self.momentum < 1:
            yield f"momentum must be between 0 and 1, got {self.momentum:g}"
        for batch_size in set(self.batch_sizes) - {batch}:
            self.of_batches(batch_size)  # raises if that batch size cannot be trained

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the number of images per rank and step in each epoch."""
        batch, first = self.per_rank_batch_size, self.grow_from or self.per_rank_batch_size
        return tuple(min(batch, first << min(epoch, MOST_DOUBLINGS)) for epoch in range(self.epochs))

    def of_batches(self, batch_size: int) -> RunSpec:
        """Return a spec of the same training with a constant number of images per rank and step."""
        return dataclasses.replace(self, per_rank_batch_size=batch_size, grow_from=0)

    @property
    def epoch_steps(self) -> tuple[int, ...]:
        """Return the number of optimizer steps in each epoch."""
        return tuple(self.shard.images // batch_size for batch_size in self.batch_sizes)

    @property
    def images(self) -> int:
        """Return the number of images that all ranks together train on in all epochs."""
        return self.world_size * sum(map(math.prod, zip(self.epoch_steps, self.batch_sizes, strict=True)))
