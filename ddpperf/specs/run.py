"""Measurement spec for training a model over several epochs by a training recipe."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ddpperf.specs.base import require_at_least, require_bool, require_number, require_one_of
from ddpperf.specs.training import TrainingSpec

OptimizerName = Literal["sgd", "lars", "lamb", "muon"]
ScheduleName = Literal["constant", "step", "multistep", "cosine", "linear", "cyclic"]
MOST = {"rate": 1e3, "momentum": 1.0, "weight_decay": 1.0, "label_smoothing": 1.0, "clip_norm": 1e6}
CHECKPOINTS_VARIABLE = "DDPPERF_CHECKPOINTS"  # environment variable of the ranks: the checkpoints' folder


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec):
    """Measurement spec for training a model over `epochs` epochs, each followed by an evaluation.

    test_images: the number of images in each evaluation.
    optimizer: SGD with Nesterov's momentum, LARS, LAMB, or Muon.
    rate: the highest learning rate.
    schedule: the schedule of the learning rate after the warm-up.
    warmup_epochs: the number of first epochs in which the learning rate rises linearly.
    label_smoothing: the fraction of a target that is spread over all classes.
    cutout: the edge length in pixels of a square hidden in each training image, or 0 for no square.
    clip_norm: the largest norm of all gradients together, or 0 for no limit.
    grow_from: the per-rank batch size of the first epoch, or 0 for a constant batch size. The batch
    size doubles each epoch up to `per_rank_batch_size`.
    recompute_statistics: whether BatchNorm's statistics are recomputed before each evaluation.
    set_epoch: whether the images are shuffled differently in each epoch.
    seed: the random seed of the parameters, the order of the images, the crops and the hidden
    squares.
    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "training_run"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True
    strategies: ClassVar[tuple[str, ...]] = ("single", "ddp")

    epochs: int
    test_images: int
    optimizer: OptimizerName = "sgd"
    rate: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: ScheduleName = "linear"
    warmup_epochs: int = 0
    label_smoothing: float = 0.0
    cutout: int = 0
    clip_norm: float = 0.0
    grow_from: int = 0
    recompute_statistics: bool = False
    set_epoch: bool = True  # type: ignore[misc]
    seed: int = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("optimizer", self.optimizer, get_args(OptimizerName))
        require_one_of("schedule", self.schedule, get_args(ScheduleName))
        for name in ("epochs", "test_images"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_epochs", "cutout", "grow_from", "seed"):
            require_at_least(name, getattr(self, name), 0)
        for name, most in MOST.items():
            require_number(name, getattr(self, name), most)
        for name in ("recompute_statistics", "set_epoch"):
            require_bool(name, getattr(self, name))
        self._require_run()

    def _require_run(self) -> None:
        batch = self.per_rank_batch_size
        for wrong, sentence in (
            (
                self.strategy not in self.strategies,
                f"a run is trained by {' or '.join(self.strategies)}, got strategy {self.strategy}; use ddp",
            ),
            (
                self.input != "device",
                f"a run takes its images from the device, got input {self.input}; use input device",
            ),
            (
                self.warmup_epochs > self.epochs,
                f"a warm-up of {self.warmup_epochs} epochs is longer than the run of {self.epochs}; "
                "shorten it",
            ),
            (
                self.grow_from > batch,
                f"grow_from={self.grow_from} is more than a batch of {batch}; use less",
            ),
            (
                batch > self.shard.images,
                f"a batch of {batch} images per rank is more than its {self.shard.images} of the data set; "
                "use a smaller one",
            ),
            (
                self.precision == "fp16",
                "each round restarts the training, which cannot reset fp16's scaler, "
                "got precision fp16; use bf16",
            ),
            (
                self.comm_hook == "powersgd",
                "each round restarts the training, which cannot reset PowerSGD's state, "
                "got comm_hook powersgd; use bf16",
            ),
            (
                bool(self.grow_from and self.compiled),
                f"execution {self.execution} compiles one batch size, "
                f"got grow_from={self.grow_from}; use eager or graph",
            ),
            (not self.drop_last, "a run's epochs have batches of one size; use drop_last"),
            (not self.rate, "rate must be more than 0, got 0"),
            (
                not 0 < self.momentum < 1,
                f"momentum must be between 0 and 1, got {self.momentum:g}",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        for batch_size in set(self.batch_sizes) - {batch}:
            self.of_batches(batch_size)  # raises if that batch size cannot be trained

    def turns(self, size: int) -> list[list[int]]:
        """Return the groups of ranks that train together; on a single device only rank 0 trains."""
        return [[0]] if self.strategy == "single" else super().turns(size)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the number of images per rank and step in each epoch."""
        first = self.grow_from or self.per_rank_batch_size
        return tuple(
            min(self.per_rank_batch_size, first * 2 ** min(epoch, 30)) for epoch in range(self.epochs)
        )

    def of_batches(self, batch_size: int) -> RunSpec:
        """Return a spec of the same training with a constant number of images per rank and step."""
        return dataclasses.replace(self, per_rank_batch_size=batch_size, grow_from=0)

    @property
    def epoch_steps(self) -> tuple[int, ...]:
        """Return the number of optimizer steps in each epoch."""
        return tuple(self.shard.images // batch_size for batch_size in self.batch_sizes)

    @property
    def id(self) -> str:
        recipe = [self.optimizer, f"rate={self.rate:g}", self.schedule]
        recipe += [f"warmup={self.warmup_epochs}"] * bool(self.warmup_epochs)
        recipe += [f"grow={self.grow_from}"] * bool(self.grow_from)
        recipe += [f"smooth={self.label_smoothing:g}"] * bool(self.label_smoothing)
        recipe += [f"cutout={self.cutout}"] * bool(self.cutout)
        for name, short in (("momentum", "momentum"), ("weight_decay", "decay")):
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                recipe.append(f"{short}={value:g}")
        recipe += [f"clip={self.clip_norm:g}"] * bool(self.clip_norm)
        recipe += ["statistics"] * self.recompute_statistics + ["no_set_epoch"] * (not self.set_epoch)
        return f"{super().id}-epochs={self.epochs}-{'+'.join(recipe)}-seed={self.seed}"

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps in all epochs of the training together."""
        return self.steps_before(self.epochs)

    def steps_before(self, epoch: int) -> int:
        """Return the number of optimizer steps in the epochs before epoch number `epoch`.

        The first epoch is 0.
        """
        return sum(self.epoch_steps[:epoch])

    @property
    def images(self) -> int:
        """Return the number of images that all ranks together train on in all epochs."""
        return self.world_size * sum(map(math.prod, zip(self.epoch_steps, self.batch_sizes, strict=True)))


def linearly_scaled(rate: float, batch_size: int, base_batch_size: int) -> float:
    """Multiply a learning rate by batch_size / base_batch_size (Goyal et al. 2017)."""
    return rate * batch_size / base_batch_size


def square_root_scaled(rate: float, batch_size: int, base_batch_size: int) -> float:
    """Multiply a learning rate by sqrt(batch_size / base_batch_size) (Krizhevsky 2014)."""
    return rate * math.sqrt(batch_size / base_batch_size)
