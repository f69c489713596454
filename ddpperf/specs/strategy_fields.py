"""The fields of a training spec for its strategy, precision, execution mode and DDP options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ddpperf.errors import quoted
from ddpperf.specs.work import Delay, Positive, Work

Strategy = Literal["single", "ddp", "own_ddp", "data_parallel", "fsdp", "zero1"]
Execution = Literal["eager", "compile", "graph", "compile+graph"]
Communication = Literal["on", "local", "no_sync"]
CommHook = Literal["none", "avg", "bf16", "fp16", "powersgd", "symmetric_memory"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]

COMPILED_EXECUTIONS = ("compile", "compile+graph")
CAPTURED_EXECUTIONS = ("graph", "compile+graph")
MOST_BUCKET_CAP_MB = 2**20
DDP_STRATEGIES = ("ddp", "zero1")  # gradients are synchronized by DistributedDataParallel
SHARDED_STRATEGIES = ("zero1", "fsdp")  # flat buffers lose a tensor's memory format
EQUAL_STRATEGIES = (*DDP_STRATEGIES, "own_ddp")  # all ranks keep equal parameters
GROUPED_STRATEGIES = (*EQUAL_STRATEGIES, "fsdp")
NOT_CAPTURED = {  # strategies and hooks that a CUDA graph cannot hold, and why
    "data_parallel": "which starts threads in every step",
    "fsdp": "whose parameters come and go in every step",
    "powersgd": "which waits for the device where it compresses",
}
DELAYED_HOOKS = ("none", "avg", "bf16", "fp16")  # hooks that OwnAverage can replace
DDP_OPTIONS: dict[str, str | int | bool] = {
    "comm_hook": "none",
    "bucket_cap_mb": 0,  # torch's default: a first bucket of 1 MiB, then buckets of 25 MiB
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "buffer_sync": True,
}
OWN_DDP_HOOKS = ("none", "symmetric_memory")
# Fields that switch off or delay DDP's communication, with the values that do neither.
APART: dict[str, str | int | float] = {"communication": "on", "comm_delay_seconds": 0.0, "comm_delay_rank": 0}
PLAIN_DDP: dict[str, Any] = {**DDP_OPTIONS, **APART, "sync_batch_norm": False}

_OPTION = r"[a-z_]\w*(\.[a-z_]\w*)*"
INDUCTOR_OPTIONS = rf"({_OPTION}(\+{_OPTION})*)?"


@dataclass(frozen=True, kw_only=True)
class StrategyFields(Work):
    """Base class of training specs, with the strategy, precision, execution mode and DDP options.

    strategy: "single" has no process group. The ranks take turns and each does the same step alone,
    except for long measurements, such as that of an epoch, which only rank 0 makes. "data_parallel"
    is one process, rank 0, that drives `world_size` GPUs. "ddp" averages gradients. "own_ddp" is
    ddpperf's minimal DDP. "zero1" also shards the optimizer's state. "fsdp" also shards the
    parameters.
    precision: "fp32" is without TF32, and "tf32" is with TF32 (GPUs only). "bf16" and "fp16" are
    autocast over fp32 parameters, and "fp16" also has a gradient scaler.
    execution: eager, torch.compile, a CUDA graph, or both.
    inductor: names of torch's compiler options, joined by "+". comm_hook, bucket_cap_mb (MiB, 0 for
    torch's default), gradient_as_bucket_view, static_graph,
    buffer_sync: options of DistributedDataParallel. own_ddp has the first two options.
    sync_batch_norm: whether BatchNorm computes its statistics over all ranks.
    accumulation_steps: the number of parts of a batch. The gradients of the parts are added up
    before the ranks synchronize gradients.
    communication: "on" sends gradients. "local" fills DDP's buckets without sending the buckets.
    "no_sync" does neither. With strategy data_parallel, "no_sync" trains kept replicas on batches
    that are already on their GPUs.
    comm_delay_seconds: by how much `comm_delay_rank` delays the last bucket of each step.
    """

    strategy: Strategy
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    execution: Execution = "eager"  # type: ignore[misc]
    inductor: str = ""
    comm_hook: CommHook = "none"
    bucket_cap_mb: Annotated[int, 0, MOST_BUCKET_CAP_MB] = 0
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    buffer_sync: bool = True
    sync_batch_norm: bool = False
    accumulation_steps: Positive = 1
    communication: Communication = "on"
    comm_delay_seconds: Delay = 0.0
    comm_delay_rank: int = 0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        strategy, hook, execution = self.strategy, self.comm_hook, self.execution
        if strategy == "data_parallel" and self.world_size < 2:
            yield "world_size must be a whole number of at least 2, got 1"
        if not re.fullmatch(INDUCTOR_OPTIONS, self.inductor):
            yield f"inductor must be names of torch's options joined by +, got {quoted(self.inductor)}"
        for name, default in APART.items():
            value = getattr(self, name)
            if value != default and strategy != "ddp" and (strategy, value) != ("data_parallel", "no_sync"):
                yield f"{name}={value} takes DDP's communication apart, got strategy {strategy}; use ddp"
        if (rank := self.comm_delay_rank) >= self.world_size:
            yield f"comm_delay_rank={rank} must be less than world_size={self.world_size}"
        for name, needed in (("communication", ("on", "no_sync")), ("comm_delay_seconds", (0.0,))):
            if (value := getattr(self, name)) not in needed and hook not in DELAYED_HOOKS:
                yield f"hook {hook} cannot have {name}={value}; use none, avg or bf16"
        for name, default in DDP_OPTIONS.items():
            if (value := getattr(self, name)) != default and name not in options_of(strategy):
                yield f"{name}={value} is an option of DDP, got strategy {strategy}; use ddp or zero1"
        if strategy == "own_ddp" and hook not in OWN_DDP_HOOKS:
            yield f"comm_hook={hook} is no hook of own_ddp; use none or symmetric_memory"
        if self.sync_batch_norm and strategy not in GROUPED_STRATEGIES:
            yield f"sync_batch_norm needs a process group, got strategy {strategy}; use ddp"
        if strategy == "fsdp" and self.precision == "fp16":
            yield "fp16's gradient scaler checks a rank's own shard of fsdp only; use precision bf16"
        if strategy in SHARDED_STRATEGIES and self.memory_format != "contiguous":
            yield f"{strategy} stores parameters in one flat buffer; use memory_format contiguous"
        if self.static_graph and self.accumulation_steps > 1:
            yield "static_graph does not work with accumulation_steps above 1; leave one of them out"
        for part in (strategy, hook):
            if self.captured and part in NOT_CAPTURED:
                yield f"execution {execution} cannot capture {part}, {NOT_CAPTURED[part]}; use eager"
        if self.captured and strategy == "zero1" and self.precision == "fp16":
            yield f"execution {execution} cannot capture zero1, which waits for fp16's scaler; use bf16"
        if self.compiled and strategy in ("data_parallel", "fsdp"):
            yield f"execution {execution} cannot compile strategy {strategy}; use eager"
        if self.inductor and not self.compiled:
            yield f"inductor={self.inductor} needs execution compile or compile+graph, got {execution}"

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


def strategy_words(spec: Any) -> str:
    """Return a spec's strategy with all non-default options as text, such as ddp+avg+bucket=4."""
    named = (
        (spec.comm_hook, spec.comm_hook != "none"),
        (f"bucket={spec.bucket_cap_mb}", spec.bucket_cap_mb > 0),
        ("view", spec.gradient_as_bucket_view),
        ("static", spec.static_graph),
        ("no_buffer_sync", not spec.buffer_sync),
        ("sync_batch_norm", spec.sync_batch_norm),
        (spec.communication, spec.communication != "on"),
        (f"comm_delay={spec.comm_delay_seconds:g}s@{spec.comm_delay_rank}", spec.comm_delay_seconds > 0),
        (f"accumulate={spec.accumulation_steps}", spec.accumulation_steps > 1),
    )
    return "+".join([spec.strategy, *(name for name, is_set in named if is_set)])


def options_of(strategy: str) -> tuple[str, ...]:
    """Return the names of the DDP options that a strategy such as "ddp" or "own_ddp" supports."""
    if strategy == "own_ddp":
        return ("comm_hook", "bucket_cap_mb")
    return tuple(DDP_OPTIONS) if strategy in DDP_STRATEGIES else ()


def gpu_reason(spec: StrategyFields, device: str) -> str:
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
