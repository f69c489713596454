"""The fields of a training spec for its strategy, precision, execution mode and DDP options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ddpperf.specs.base import Work, require_at_least, require_bool, require_delay, require_one_of

Strategy = Literal["single", "ddp", "own_ddp", "data_parallel", "fsdp", "zero1"]
Execution = Literal["eager", "compile", "graph", "compile+graph"]
Communication = Literal["on", "local", "no_sync"]
CommHook = Literal["none", "avg", "bf16", "fp16", "powersgd", "symmetric_memory"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]

COMPILED_EXECUTIONS = ("compile", "compile+graph")
CAPTURED_EXECUTIONS = ("graph", "compile+graph")
DEFAULT_BUCKET_CAP_MB = 0  # torch's default: a first bucket of 1 MiB, then buckets of 25 MiB
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
    "bucket_cap_mb": DEFAULT_BUCKET_CAP_MB,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "buffer_sync": True,
}
OWN_DDP_OPTIONS = ("comm_hook", "bucket_cap_mb")
OWN_DDP_HOOKS = ("none", "symmetric_memory")
# Fields that switch off or delay DDP's communication, with the values that do neither.
APART: dict[str, str | int | float] = {"communication": "on", "comm_delay_seconds": 0.0, "comm_delay_rank": 0}

_INDUCTOR_OPTION = r"[a-z_]\w*(\.[a-z_]\w*)*"


@dataclass(frozen=True, kw_only=True)
class StrategyFields(Work):
    """Base class of training specs, with the strategy, precision, execution mode and DDP options.

    strategy: "single" has no process group. The ranks take turns and each does the same step alone.
    "data_parallel" is one process, rank 0, that drives `world_size` GPUs. "ddp" averages gradients.
    "own_ddp" is ddpperf's minimal DDP. "zero1" also shards the optimizer's state. "fsdp" also
    shards the parameters.
    precision: "fp32" is without TF32, and "tf32" is with TF32 (GPUs only). "bf16" and "fp16" are
    autocast over fp32 parameters, and "fp16" also has a gradient scaler.
    execution: eager, torch.compile, a CUDA graph, or both.
    inductor: names of torch's compiler options, joined by "+".
    comm_hook, bucket_cap_mb (MiB, 0 for torch's default), gradient_as_bucket_view, static_graph,
    buffer_sync: options of DistributedDataParallel. own_ddp has the first two options.
    sync_batch_norm: whether BatchNorm computes its statistics over all ranks.
    accumulation_steps: the number of parts of a batch. The gradients of the parts are added up
    before the ranks synchronize gradients.
    communication: "on" sends gradients. "local" fills DDP's buckets without sending the buckets.
    "no_sync" does neither.
    comm_delay_seconds: by how much `comm_delay_rank` delays the last bucket of each step.
    Raises ValueError for values that do not go together.
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("precision", self.precision, get_args(Precision))
        require_one_of("memory_format", self.memory_format, get_args(MemoryFormat))
        require_one_of("strategy", self.strategy, get_args(Strategy))
        require_one_of("execution", self.execution, get_args(Execution))
        require_one_of("comm_hook", self.comm_hook, get_args(CommHook))
        require_one_of("communication", self.communication, get_args(Communication))
        require_at_least("world_size", self.world_size, 2 if self.strategy == "data_parallel" else 1)
        require_at_least("bucket_cap_mb", self.bucket_cap_mb, 0)
        require_at_least("accumulation_steps", self.accumulation_steps, 1)
        require_at_least("comm_delay_rank", self.comm_delay_rank, 0)
        require_delay("comm_delay_seconds", self.comm_delay_seconds)
        if self.bucket_cap_mb > MOST_BUCKET_CAP_MB:
            raise ValueError(f"bucket_cap_mb goes up to {MOST_BUCKET_CAP_MB}, got {self.bucket_cap_mb}")
        for name in ("gradient_as_bucket_view", "static_graph", "buffer_sync", "sync_batch_norm"):
            require_bool(name, getattr(self, name))
        names = rf"({_INDUCTOR_OPTION}(\+{_INDUCTOR_OPTION})*)?"
        if not (isinstance(self.inductor, str) and re.fullmatch(names, self.inductor)):
            raise ValueError(
                f"inductor must be names of torch's inductor options joined by +, got {self.inductor!r}"
            )
        self._require_apart()
        self._require_options()
        self._require_execution()

    def _require_apart(self) -> None:
        for name, default in APART.items():
            if (value := getattr(self, name)) != default and self.strategy != "ddp":
                raise ValueError(
                    f"{name}={value} takes DDP's communication apart, got strategy {self.strategy}; use ddp"
                )
        if self.comm_delay_rank >= self.world_size:
            raise ValueError(
                f"comm_delay_rank={self.comm_delay_rank} must be less than world_size={self.world_size}"
            )
        if self.comm_hook in DELAYED_HOOKS:
            return
        for name, needed in (("communication", ("on", "no_sync")), ("comm_delay_seconds", (0.0,))):
            if (value := getattr(self, name)) not in needed:
                raise ValueError(f"hook {self.comm_hook} cannot have {name}={value}; use none, avg or bf16")

    def _require_options(self) -> None:
        strategy = self.strategy
        for name, default in DDP_OPTIONS.items():
            if (value := getattr(self, name)) != default and name not in options_of(strategy):
                raise ValueError(
                    f"{name}={value} is an option of DDP, got strategy {strategy}; "
                    "use ddp or zero1, or leave it out"
                )
        if strategy == "own_ddp" and self.comm_hook not in OWN_DDP_HOOKS:
            raise ValueError(
                f"comm_hook={self.comm_hook} works with strategy ddp only, got own_ddp; "
                "use none or symmetric_memory"
            )
        if self.sync_batch_norm and strategy not in GROUPED_STRATEGIES:
            raise ValueError(
                f"sync_batch_norm needs a process group, got strategy {strategy}; "
                "use ddp, own_ddp, zero1 or fsdp"
            )
        if strategy == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "fp16's gradient scaler checks a rank's own shard only, got strategy fsdp; use precision bf16"
            )
        if strategy in SHARDED_STRATEGIES and self.memory_format != "contiguous":
            raise ValueError(
                f"{strategy} stores parameters in one flat buffer, got {self.memory_format}; use contiguous"
            )
        if self.static_graph and self.accumulation_steps > 1:
            raise ValueError(
                "static_graph does not work with accumulation_steps above 1; leave one of them out"
            )

    def _require_execution(self) -> None:
        execution = self.execution
        if self.captured:
            for part in (self.strategy, self.comm_hook):
                if part in NOT_CAPTURED:
                    raise ValueError(
                        f"execution {execution} cannot capture {part}, {NOT_CAPTURED[part]}; use eager"
                    )
            if self.strategy == "zero1" and self.precision == "fp16":
                raise ValueError(
                    f"execution {execution} cannot capture fp16's scaler with zero1, "
                    "which waits for the scaler; use bf16"
                )
        if self.compiled and self.strategy in ("data_parallel", "fsdp"):
            raise ValueError(f"execution {execution} cannot compile strategy {self.strategy}; use eager")
        if self.inductor and not self.compiled:
            raise ValueError(
                f"inductor={self.inductor} needs execution compile or compile+graph, got {execution}"
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

    @property
    def maps_memory(self) -> bool:
        return self.comm_hook == "symmetric_memory"

    def turns(self, size: int) -> list[list[int]]:
        if self.strategy == "single":
            return [[rank] for rank in range(size)]
        return [[0]] if self.strategy == "data_parallel" else super().turns(size)

    @property
    def strategy_id(self) -> str:
        """Return the strategy's name with all non-default options, such as ddp+avg+bucket=4."""
        named = (
            (self.comm_hook, self.comm_hook != "none"),
            (f"bucket={self.bucket_cap_mb}", self.bucket_cap_mb != DEFAULT_BUCKET_CAP_MB),
            ("view", self.gradient_as_bucket_view),
            ("static", self.static_graph),
            ("no_buffer_sync", not self.buffer_sync),
            ("sync_batch_norm", self.sync_batch_norm),
            (self.communication, self.communication != "on"),
            (f"comm_delay={self.comm_delay_seconds:g}s@{self.comm_delay_rank}", self.comm_delay_seconds > 0),
            (f"accumulate={self.accumulation_steps}", self.accumulation_steps > 1),
        )
        return "+".join([self.strategy, *(name for name, is_set in named if is_set)])


def options_of(strategy: str) -> tuple[str, ...]:
    """Return the names of the DDP options that a strategy such as "ddp" or "own_ddp" supports."""
    if strategy == "own_ddp":
        return OWN_DDP_OPTIONS
    return tuple(DDP_OPTIONS) if strategy in DDP_STRATEGIES else ()


def gpu_reason(spec: StrategyFields, device: str) -> str:
    """Return why a training spec needs a GPU, or "" if it can run on the given device."""
    if device != "cpu":
        return ""
    for needed, what in (
        (spec.captured, f"execution {spec.execution} is captured by a GPU's driver"),
        (spec.strategy == "data_parallel", "strategy data_parallel drives several GPUs from one process"),
        (spec.comm_hook in ("avg", "powersgd"), f"comm_hook {spec.comm_hook} needs NCCL"),
        (spec.maps_memory, "comm_hook symmetric_memory maps the memory of GPUs"),
        (spec.sync_batch_norm, "sync_batch_norm works on GPUs only"),
    ):
        if needed:
            return f"{what}; this runs on the CPU"
    return ""
