"""The fields of a training spec for its strategy, precision, execution mode and DDP options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from ddpperf.specs.common_fields import Delay, Positive, Rule, Rules, Work

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
# Strategies and hooks that a CUDA graph cannot hold: data_parallel starts threads in every step, fsdp's
# parameters come and go in every step, and powersgd waits for the device where it compresses.
NOT_CAPTURED = ("data_parallel", "fsdp", "powersgd")
DELAYED_HOOKS = ("none", "avg", "bf16", "fp16")  # hooks that OwnAverage can replace
DDP_OPTIONS: dict[str, str | int | bool] = {
    "comm_hook": "none",
    "bucket_cap_mb": 0,  # torch's default: a first bucket of 1 MiB, then buckets of 25 MiB
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "buffer_sync": True,
}
OWN_DDP_HOOKS = ("none", "symmetric_memory")
PLAIN_DDP: dict[str, Any] = {
    **DDP_OPTIONS,
    "communication": "on",
    "comm_delay_seconds": 0.0,
    "comm_delay_rank": 0,
    "sync_batch_norm": False,
}
# How a label names the options that differ from their defaults. The value is argument 0.
STRATEGY_WORDS = {
    "comm_hook": "{}",
    "bucket_cap_mb": "bucket={}",
    "gradient_as_bucket_view": "view",
    "static_graph": "static",
    "buffer_sync": "no_buffer_sync",
    "sync_batch_norm": "sync_batch_norm",
    "communication": "{}",
    "comm_delay_seconds": "comm_delay={:g}s@{spec.comm_delay_rank}",
    "accumulation_steps": "accumulate={}",
}
_OPTION = r"[a-z_]\w*(\.[a-z_]\w*)*"
InductorOptions = Annotated[str, rf"({_OPTION}(\+{_OPTION})*)?", "names of torch's options joined by +"]


def options_of(strategy: str) -> tuple[str, ...]:
    """Return the names of the DDP options that a strategy such as "ddp" or "own_ddp" supports."""
    if strategy == "own_ddp":
        return ("comm_hook", "bucket_cap_mb")
    return tuple(DDP_OPTIONS) if strategy in DDP_STRATEGIES else ()


def _without(values: Any, *others: str) -> tuple[str, ...]:
    return tuple(value for value in get_args(values) if value not in others)


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
    communication: "on" sends gradients. "local" fills DDP's buckets without sending the buckets.
    "no_sync" does neither. With strategy data_parallel, "no_sync" trains kept replicas on batches
    that are already on their GPUs.
    """

    rules: ClassVar[Rules] = (
        *(
            Rule(option, strategy=tuple(name for name in get_args(Strategy) if option in options_of(name)))
            for option in DDP_OPTIONS
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
    bucket_cap_mb: Annotated[int, 0, MOST_BUCKET_CAP_MB] = 0  # MiB; 0 for torch's default
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    buffer_sync: bool = True
    sync_batch_norm: bool = False  # whether BatchNorm computes its statistics over all ranks
    accumulation_steps: Positive = 1  # parts of a batch, whose gradients are added up before they are sent
    communication: Communication = "on"
    comm_delay_seconds: Delay = 0.0  # by how much `comm_delay_rank` delays the last bucket of each step
    comm_delay_rank: int = 0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.strategy == "data_parallel" and self.world_size < 2:
            yield "world_size must be a whole number of at least 2, got 1"
        if (rank := self.comm_delay_rank) >= self.world_size:
            yield f"comm_delay_rank={rank} must be less than world_size={self.world_size}"
        if self.captured and self.strategy == "zero1" and self.precision == "fp16":
            yield f"execution {self.execution} cannot capture zero1, which waits for fp16's scaler; use bf16"

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
    return "+".join([spec.strategy, *words_of(spec, StrategyFields, STRATEGY_WORDS)])


def words_of(spec: Any, usual: type, words: Mapping[str, str]) -> list[str]:
    """Return the words for the fields of a spec that differ from their defaults in the class `usual`."""
    changed = {name: getattr(spec, name) for name in words if getattr(spec, name) != getattr(usual, name)}
    return [words[name].format(value, spec=spec) for name, value in changed.items()]


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
