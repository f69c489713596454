"""Measurement specs for one training step, for one epoch of steps, and for the images of an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from ddpperf.specs.spec import Delay, Function, Positive, Rule, Rules, Spec

Strategy = Literal["single", "ddp", "own_ddp", "data_parallel", "fsdp", "zero1"]
Execution = Literal["eager", "compile", "graph", "compile+graph"]
Communication = Literal["on", "local", "no_sync"]
CommHook = Literal["none", "avg", "bf16", "fp16", "powersgd", "symmetric_memory"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]
Model = Literal["resnet18", "resnet18_cifar", "resnet50", "resnet50_cifar", "resnet10_cifar"]
ModelName = Annotated[
    str,
    "|".join((*get_args(Model), r"torchvision:\w+", get_args(Function)[1])),
    f"one of {', '.join(get_args(Model))}, torchvision:NAME or package.module:function",
]
IMAGENET_STEM: tuple[Model, ...] = ("resnet18", "resnet50")  # their last stage has one value per image
Input = Literal["fixed", "device", "dataloader"]
# An environment variable of the ranks with the path of the data set's file, unless the data set is
# synthetic. A rank opens no other file that a message names.
DATA_VARIABLE = "DDPPERF_DATA"

COMPILED_EXECUTIONS = ("compile", "compile+graph")
CAPTURED_EXECUTIONS = ("graph", "compile+graph")
MOST_BUCKET_CAP_MB = 2**20
DDP_STRATEGIES = ("ddp", "zero1")  # gradients are synchronized by DistributedDataParallel
SHARDED_STRATEGIES = ("zero1", "fsdp")  # flat buffers lose a tensor's memory format
EQUAL_STRATEGIES = (*DDP_STRATEGIES, "own_ddp")  # all ranks keep equal parameters
GROUPED_STRATEGIES = (*EQUAL_STRATEGIES, "fsdp")
# Strategies and hooks that a CUDA graph cannot hold: data_parallel starts threads in every step, fsdp's
# parameters come and go in every step, and powersgd waits for the device where it compresses.
NOT_CAPTURED = ("data_parallel", "fsdp", "powersgd")
DELAYED_HOOKS = ("none", "avg", "bf16", "fp16")  # hooks that OwnAverage can replace
DDP_NAMES = ("comm_hook", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "buffer_sync")
OWN_DDP_HOOKS = ("none", "symmetric_memory")
InductorOptions = Annotated[str, r"([a-z_]\w*([.+][a-z_]\w*)*)?", "names of torch's options joined by +"]


def options_of(strategy: str) -> tuple[str, ...]:
    """Return the names of the DDP options that a strategy such as "ddp" or "own_ddp" supports."""
    if strategy == "own_ddp":
        return ("comm_hook", "bucket_cap_mb")
    return DDP_NAMES if strategy in DDP_STRATEGIES else ()


def _without(values: Any, *others: str) -> tuple[str, ...]:
    return tuple(value for value in get_args(values) if value not in others)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The images that one process trains on in an epoch, and the number of its batches.

    All shards have the same size, as torch's DistributedSampler makes them. With drop_last some
    images are left out, otherwise some images are repeated. A batch larger than the shard is filled
    by repeating the shard's images.
    """

    epoch_images: int
    processes: int
    batch_size: int
    drop_last: bool

    @property
    def images(self) -> int:
        rest = 0 if self.drop_last else self.processes - 1
        return (self.epoch_images + rest) // self.processes

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.images, self.batch_size)
        return max(1, whole if self.drop_last or not rest else whole + 1)

    @property
    def last_batch_size(self) -> int:
        rest = self.images % self.batch_size
        is_smaller = rest and self.images > self.batch_size and not self.drop_last
        return rest if is_smaller else self.batch_size


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Spec):
    """Measurement spec for one optimizer step: forward, backward, gradient synchronization, update.

    strategy: "single" has no process group. The ranks take turns and each does the same step alone,
    except for long measurements, such as that of an epoch, which only rank 0 makes. "data_parallel"
    is one process, rank 0, that drives `world_size` GPUs. "ddp" averages gradients. "own_ddp" is
    ddpperf's minimal DDP. "zero1" also shards the optimizer's state. "fsdp" also shards the
    parameters.
    precision: "fp32" is without TF32, and "tf32" is with TF32 (GPUs only). "bf16" and "fp16" are
    autocast over fp32 parameters, and "fp16" also has a gradient scaler.
    execution: eager, torch.compile, a CUDA graph, or both.
    communication: "on" sends gradients. "local" fills DDP's buckets without sending the buckets.
    "no_sync" does neither. With strategy data_parallel, "no_sync" trains kept replicas on batches
    that are already on their GPUs.
    input: "fixed" trains on one batch again and again. "device" crops and flips batches of a data
    set that is in the device's memory. "dataloader" loads batches with `loader_workers` processes.
    """

    measurement: ClassVar[str] = "training_step"
    rules: ClassVar[Rules] = (
        Rule("strategy", ("single",), world_size=(1,)),
        Rule("loader_workers", input=("dataloader",)),
        *(
            Rule(option, strategy=tuple(name for name in get_args(Strategy) if option in options_of(name)))
            for option in DDP_NAMES
        ),
        Rule("strategy", ("own_ddp",), comm_hook=OWN_DDP_HOOKS),
        # DataParallel without communication trains kept replicas.
        Rule("communication", ("no_sync",), strategy=("ddp", "data_parallel")),
        Rule("communication", ("local",), strategy=("ddp",), comm_hook=DELAYED_HOOKS),
        Rule("comm_delay_seconds", strategy=("ddp",), comm_hook=DELAYED_HOOKS),
        Rule("comm_delay_rank", strategy=("ddp",)),
        Rule("sync_batch_norm", strategy=GROUPED_STRATEGIES),
        Rule("strategy", SHARDED_STRATEGIES, memory_format=("contiguous",)),
        # fp16's gradient scaler checks a rank's own shard only
        Rule("strategy", ("fsdp",), precision=_without(Precision, "fp16")),
        Rule("static_graph", accumulation_steps=(1,)),
        Rule(
            "execution",
            CAPTURED_EXECUTIONS,
            strategy=_without(Strategy, *NOT_CAPTURED),
            comm_hook=_without(CommHook, *NOT_CAPTURED),
        ),
        Rule("execution", COMPILED_EXECUTIONS, strategy=_without(Strategy, "data_parallel", "fsdp")),
        Rule("inductor", execution=COMPILED_EXECUTIONS),
    )

    strategy: Strategy
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    execution: Execution = "eager"  # type: ignore[misc]
    inductor: InductorOptions = ""  # names of torch's compiler options
    # Options of DistributedDataParallel, of which own_ddp has the first two:
    comm_hook: CommHook = "none"
    bucket_cap_mb: Annotated[int, 0, MOST_BUCKET_CAP_MB] = 0  # MiB; 0: first 1 MiB, then 25 MiB, as in torch
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    buffer_sync: bool = True
    sync_batch_norm: bool = False  # whether BatchNorm computes its statistics over all ranks
    accumulation_steps: Positive = 1  # parts of a batch, whose gradients are added up before they are sent
    communication: Communication = "on"
    comm_delay_seconds: Delay = 0.0  # by how much `comm_delay_rank` delays the last bucket of each step
    comm_delay_rank: int = 0
    model: ModelName = "resnet18"
    per_rank_batch_size: Positive  # images; the global batch is `world_size` times as large
    input: Input = "fixed"
    loader_workers: int = 0
    data: str = "synthetic"  # the name of the data set
    digest: str = ""  # a hash of the data set's images
    epoch_images: int = 1024
    drop_last: bool = True  # whether to leave out a smaller last batch

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.strategy == "data_parallel" and self.world_size < 2:
            yield "world_size must be a whole number of at least 2, got 1"
        if (rank := self.comm_delay_rank) >= self.world_size:
            yield f"comm_delay_rank={rank} must be less than world_size={self.world_size}"
        if self.captured and self.strategy == "zero1" and self.precision == "fp16":
            yield f"execution {self.execution} cannot capture zero1, which waits for fp16's scaler; use bf16"
        N, model, parts = self.world_size, self.model, self.accumulation_steps
        batch, last = self.process_batch_size, self.last_batch_size
        for size in {batch, last}:
            if size % parts:
                yield f"accumulation_steps={parts} does not divide a batch of {size} images; use a divisor"
        per_device = -(-last // (N // self.processes))  # DataParallel's last device gets what is left
        least = min(self.per_rank_batch_size, last % per_device or per_device)
        if model in IMAGENET_STEM and least < 2 * parts:
            found = f"got a batch of {least}{f' in {parts} parts' * (parts > 1)}"
            yield f"{model}'s last BatchNorm needs 2 images, {found}; use batches of at least {2 * parts}"
        if self.captured and last != batch:
            yield f"execution {self.execution} needs batches of one size; use drop_last"
        if is_custom_model(model) and (self.memory_format, self.input) != ("contiguous", "fixed"):
            found = f"got {self.memory_format} and {self.input}"
            yield f"{model} makes its own batches: use memory_format contiguous and input fixed, {found}"
        if self.input == "dataloader" and self.repeats:
            yield "a dataloader runs ahead between the rounds of a step; measure an epoch (EpochSpec)"

    @property
    def grouped(self) -> bool:
        return self.strategy in GROUPED_STRATEGIES

    @property
    def maps_memory(self) -> bool:
        return self.comm_hook == "symmetric_memory"

    def turns(self, size: int) -> list[list[int]]:
        if self.strategy == "single" and self.repeats:
            return [[rank] for rank in range(size)]
        return [[0]] if self.strategy in ("single", "data_parallel") else super().turns(size)

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.model,) if is_custom_model(self.model) else ()

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.per_rank_batch_size

    @property
    def processes(self) -> int:
        """Return the number of processes that divide an epoch's images among themselves."""
        return self.world_size if self.grouped else 1

    @property
    def process_batch_size(self) -> int:
        """Return the number of images that one process trains on in one step."""
        return self.global_batch_size // self.processes

    @property
    def shard(self) -> Shard:
        """Return the part of an epoch's images that one process trains on."""
        return Shard(
            epoch_images=self.epoch_images,
            processes=self.processes,
            batch_size=self.process_batch_size,
            drop_last=self.drop_last,
        )

    @property
    def last_batch_size(self) -> int:
        """Return the number of images that one process trains on in the last step of an epoch."""
        return self.process_batch_size if self.input == "fixed" else self.shard.last_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.shard.steps

    @property
    def images_per_epoch(self) -> int:
        """Return the number of images that all processes together train on in an epoch."""
        return self.processes * ((self.steps_per_epoch - 1) * self.process_batch_size + self.last_batch_size)

    def ddp(self) -> Self:
        """Return a spec for the same training step by DDP with default options."""
        return dataclasses.replace(self, **PLAIN_DDP, strategy="ddp", accumulation_steps=1)

    def one_device(self) -> Self:
        """Return a spec for the same training step on a single device.

        Its seconds are the single-device step time t(1) of a speedup.
        """
        alone: dict[str, Any] = {"world_size": 1, "strategy": "single", "delay_seconds": 0.0}
        return dataclasses.replace(self, **PLAIN_DDP | alone)

    def no_sync(self) -> Self:
        """Return a spec for the same training step without any communication between the devices."""
        buffers: dict[str, Any] = {} if self.strategy == "data_parallel" else {"buffer_sync": False}
        return dataclasses.replace(self, communication="no_sync", **buffers)

    def local(self) -> Self:
        """Return a spec for the same training step where DDP fills buckets but sends nothing."""
        return dataclasses.replace(self, communication="local", buffer_sync=False)


# The defaults of DDP's options, and of all fields in which a step may differ from plain DDP
DDP_OPTIONS: dict[str, Any] = {name: getattr(TrainingSpec, name) for name in DDP_NAMES}
PLAIN_DDP: dict[str, Any] = DDP_OPTIONS | {
    name: getattr(TrainingSpec, name)
    for name in ("communication", "comm_delay_seconds", "comm_delay_rank", "sync_batch_norm")
}


@dataclass(frozen=True, kw_only=True)
class EpochSpec(TrainingSpec):
    """Measurement spec for one training epoch, from loading its first batch to its last update.

    The epoch is measured after a warm-up.
    """

    measurement: ClassVar[str] = "training_epoch"
    repeats: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class SamplerSpec(Spec):
    """Measurement spec for the image indices that DistributedSampler gives each rank in an epoch.

    set_epoch: whether the sampler is given the number of each epoch. Without this number the images
    are in the same order in every epoch.
    """

    measurement: ClassVar[str] = "sampler"

    epoch_images: int
    set_epoch: bool = True  # type: ignore[misc]
    drop_last: bool = False

    @property
    def shard(self) -> Shard:
        """Return the images that each rank gets in an epoch, in one batch."""
        images, N, drop_last = self.epoch_images, self.world_size, self.drop_last
        shard = Shard(epoch_images=images, processes=N, batch_size=1, drop_last=drop_last)
        return dataclasses.replace(shard, batch_size=shard.images)


def is_custom_model(model: str) -> bool:
    """Return whether a model's name is that of a custom model: `package.module:function`."""
    return ":" in model and not model.startswith("torchvision:")


def gpu_reason(spec: TrainingSpec, device: str) -> str:
    """Return why a training spec needs a GPU, or "" if it can run on the given device."""
    for needed, what in (
        (spec.captured, f"execution {spec.execution} is captured by a GPU's driver"),
        (spec.strategy == "data_parallel", "strategy data_parallel drives several GPUs from one process"),
        (spec.comm_hook in ("avg", "powersgd"), f"comm_hook {spec.comm_hook} needs NCCL"),
        (spec.maps_memory, "comm_hook symmetric_memory maps the memory of GPUs"),
        (spec.sync_batch_norm, "sync_batch_norm works on GPUs only"),
    ):
        if needed and device == "cpu":
            return f"{what}; this runs on the CPU"
    return ""
