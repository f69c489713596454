"""What can be measured of training: a step of it, or an epoch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ddpperf.specs.base import Work, require_at_least, require_one_of
from ddpperf.specs.model import is_custom_model, require_model
from ddpperf.specs.strategy import (
    APART,
    CAPTURED_EXECUTIONS,
    COMPILED_EXECUTIONS,
    DDP_OPTIONS,
    DEFAULT_BUCKET_CAP_MB,
    GROUPED_STRATEGIES,
    CommHook,
    Communication,
    Execution,
    Strategy,
    execution_id,
    require_strategy,
    strategy_id,
)

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]
Input = Literal["fixed", "device", "dataloader"]
# Of a rank's environment, for no message can name a file: the cached tensors of the data set, unless that is synthetic.
DATA_VARIABLE = "DDPPERF_DATA"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Work):
    """One optimizer step of a model: forward, backward, gradient synchronization, update.

    model: one of ours, `torchvision:NAME`, or the user's own by `package.module:function`. precision: fp32 without TF32,
    tf32 with it (a GPU's), or bf16 and fp16 autocast over fp32 parameters, fp16 with a gradient scaler. Weak scaling
    holds `per_rank_batch_size`; the global batch is `world_size` times as large.
    strategy: "single" has no process group: each rank of the set does the same step alone, one rank at a time.
    "data_parallel" is one process, rank 0, that drives `world_size` GPUs. "ddp" averages gradients, "own_ddp" does so by as
    little as it takes, "zero1" shards the optimizer's state besides, "fsdp" the parameters, too. comm_hook, bucket_cap_mb (MiB;
    0: the default, of several sizes), gradient_as_bucket_view, static_graph, buffer_sync: DistributedDataParallel's own, the
    first two own_ddp's, too. sync_batch_norm: over all ranks. accumulation_steps: parts of a batch whose gradients are added up
    before they are synchronized.
    communication: whether DDP sends its buckets of gradients ("on"), fills them only ("local"), or not even that ("no_sync");
    to take a step apart. comm_delay_seconds: how much later than it could `comm_delay_rank` sends the last bucket of a step.
    form: how a step is run: operation by operation, compiled, captured in a graph, or both. inductor: compiler options, by +.
    input: "fixed" trains on one batch again and again; "device" crops and flips batches of a data set that lies on the
    device; "dataloader" loads them by `loader_workers` processes. data: the name of the data set, digest: of its images.
    epoch_images: how many of its images an epoch has. drop_last: leave out an epoch's last, smaller batch.
    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "training_step"

    model: str = "resnet18"
    per_rank_batch_size: int
    strategy: Strategy
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    execution: Execution = "eager"
    inductor: str = ""
    comm_hook: CommHook = "none"
    bucket_cap_mb: int = DEFAULT_BUCKET_CAP_MB
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    buffer_sync: bool = True
    sync_batch_norm: bool = False
    accumulation_steps: int = 1
    communication: Communication = "on"
    comm_delay_seconds: float = 0.0
    comm_delay_rank: int = 0
    input: Input = "fixed"
    loader_workers: int = 0
    data: str = "synthetic"
    digest: str = ""
    epoch_images: int = 1024
    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_model(self.model)
        require_one_of("precision", self.precision, get_args(Precision))
        require_one_of("memory_format", self.memory_format, get_args(MemoryFormat))
        require_one_of("input", self.input, get_args(Input))
        require_at_least("world_size", self.world_size, 2 if self.strategy == "data_parallel" else 1)
        require_at_least("per_rank_batch_size", self.per_rank_batch_size, 1)
        require_at_least("loader_workers", self.loader_workers, 0)
        require_at_least("epoch_images", self.epoch_images, self.world_size)
        if not (
            isinstance(self.data, str) and isinstance(self.digest, str) and isinstance(self.drop_last, bool)
        ):
            raise ValueError(
                f"data and digest must be words and drop_last a bool, got {self.data!r}, {self.digest!r}, {self.drop_last!r}"
            )
        require_strategy(self)
        self._require_consistent()

    def _require_consistent(self) -> None:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(
                f"strategy single is one device, got world_size={self.world_size}; use world_size=1 or ddp"
            )
        for size in {self.process_batch_size, self._last_batch_size}:
            if size % self.accumulation_steps:
                raise ValueError(
                    f"accumulation_steps={self.accumulation_steps} does not divide a batch of {size} images; use a divisor"
                )
        if self.model == "resnet18" and self._least_batch_size < (least := 2 * self.accumulation_steps):
            parts = f" in {self.accumulation_steps} parts" if self.accumulation_steps > 1 else ""
            raise ValueError(
                f"resnet18 normalizes one value an image in its last stage, got a batch of {self._least_batch_size}{parts}; "
                f"use batches of at least {least}"
            )
        if self.captured and self._last_batch_size != self.process_batch_size:
            raise ValueError(
                f"form {self.execution} repeats one batch size, an epoch ends with a smaller one; use drop_last"
            )
        if is_custom_model(self.model) and self.memory_format != "contiguous":
            raise ValueError(
                f"{self.model} has its own memory format, got {self.memory_format}; use contiguous"
            )
        if is_custom_model(self.model) and self.input != "fixed":
            raise ValueError(f"{self.model} makes its own batches, got input {self.input}; use input fixed")
        if self.loader_workers and self.input != "dataloader":
            raise ValueError(f"loader_workers={self.loader_workers} needs input dataloader, got {self.input}")
        if self.input == "dataloader" and self.repeats:
            raise ValueError(
                "a dataloader runs ahead between the rounds of a step; measure an epoch of it (EpochSpec)"
            )

    @property
    def grouped(self) -> bool:
        return self.strategy in GROUPED_STRATEGIES

    @property
    def compiled(self) -> bool:
        return self.execution in COMPILED_EXECUTIONS

    @property
    def captured(self) -> bool:
        return self.execution in CAPTURED_EXECUTIONS

    def turns(self, size: int) -> list[list[int]]:
        if self.strategy == "single":
            return [[rank] for rank in range(size)]
        return [[0]] if self.strategy == "data_parallel" else super().turns(size)

    @property
    def busy_processes(self) -> int:
        """The ranks that work at the same time, and the processes that load their images."""
        return super().busy_processes * (1 + self.loader_workers)

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.per_rank_batch_size

    @property
    def processes(self) -> int:
        """How many processes share an epoch's images."""
        return self.world_size if self.grouped else 1

    @property
    def process_batch_size(self) -> int:
        """Images in a step of one process."""
        return self.global_batch_size // self.processes

    @property
    def _shard_images(self) -> int:
        """An epoch's images for one process, as DistributedSampler splits them."""
        return (
            self.epoch_images // self.processes if self.drop_last else -(-self.epoch_images // self.processes)
        )

    @property
    def _last_batch_size(self) -> int:
        """Of one process' last step of an epoch; a batch beyond the data set wraps around, and is whole."""
        rest = self._shard_images % self.process_batch_size
        smaller = (
            rest
            and self._shard_images > self.process_batch_size
            and not self.drop_last
            and self.input != "fixed"
        )
        return rest if smaller else self.process_batch_size

    @property
    def _least_batch_size(self) -> int:
        """The fewest images that a device has in a step; DataParallel gives the last of several what is left."""
        share = -(-self._last_batch_size // (self.world_size // self.processes))
        return min(self.per_rank_batch_size, self._last_batch_size % share or share)

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self._shard_images, self.process_batch_size)
        return max(1, whole if self.drop_last or not rest else whole + 1)

    @property
    def images_per_epoch(self) -> int:
        """The images that an epoch's steps train on, over all processes."""
        return self.processes * ((self.steps_per_epoch - 1) * self.process_batch_size + self._last_batch_size)

    @property
    def id(self) -> str:
        """The cell's part of a test id, which is a stored key: every part, always in this order."""
        work = f"world_size={self.world_size}-batch={self.per_rank_batch_size}-{self.model}"
        workers = self.loader_workers if self.input == "dataloader" else ""
        return f"{work}-{strategy_id(self)}-{self.precision}-{execution_id(self)}-{self.input}{workers}"

    @property
    def needs_torchvision(self) -> bool:
        """Whether its ranks import torchvision: for a model of its, or a loader's transforms."""
        return self.model.startswith("torchvision:") or self.input == "dataloader"

    def ddp(self) -> TrainingSpec:
        """The same step by DDP as it is without any option."""
        plain: dict[str, Any] = {**DDP_OPTIONS, **APART, "sync_batch_norm": False, "accumulation_steps": 1}
        return dataclasses.replace(self, strategy="ddp", **plain)

    @property
    def maps_memory(self) -> bool:
        return self.comm_hook == "symmetric_memory"

    def one_device(self) -> TrainingSpec:
        """The same step on one device without communication: the t(1) of a speedup."""
        alone = {**DDP_OPTIONS, **APART, "sync_batch_norm": False, "delay_seconds": 0.0, "fault": None}
        return dataclasses.replace(self, world_size=1, strategy="single", **alone)  # type: ignore[arg-type]

    def no_sync(self) -> TrainingSpec:
        """The same step by ranks that leave each other alone."""
        return dataclasses.replace(self, communication="no_sync", buffer_sync=False)

    def local(self) -> TrainingSpec:
        """The same step with all that DDP does for its communication, but that it sends nothing."""
        return dataclasses.replace(self, communication="local", buffer_sync=False)

    def eager(self) -> TrainingSpec:
        """The same step, operation by operation."""
        return dataclasses.replace(self, execution="eager", inductor="")


@dataclass(frozen=True, kw_only=True)
class EpochSpec(TrainingSpec):
    """One epoch of the same training, from the first batch's loading to the last update, after warm-up."""

    measurement: ClassVar[str] = "training_epoch"
    repeats: ClassVar[bool] = False

    def turns(self, size: int) -> list[list[int]]:
        """As of a step, but on one device an epoch, which takes long, is rank 0's alone: that is its T(1)."""
        return [[0]] if self.strategy == "single" else super().turns(size)
