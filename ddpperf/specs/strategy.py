"""How a training is spread over devices and how its step is run: the names, what goes together, and how ids spell it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, get_args

from ddpperf.specs.base import require_at_least, require_bool, require_delay, require_one_of

if TYPE_CHECKING:
    from ddpperf.specs.training import TrainingSpec

Strategy = Literal["single", "ddp", "own_ddp", "data_parallel", "fsdp", "zero1"]
Execution = Literal["eager", "compile", "graph", "compile+graph"]
Communication = Literal["on", "local", "no_sync"]
CommHook = Literal["none", "avg", "bf16", "fp16", "powersgd", "symmetric_memory"]

COMPILED_EXECUTIONS = ("compile", "compile+graph")
CAPTURED_EXECUTIONS = ("graph", "compile+graph")
DEFAULT_BUCKET_CAP_MB = (
    0  # torch's own: a first bucket of 1 MiB, then of 25; any number is that of the first one, too
)
MOST_BUCKET_CAP_MB = 2**20
DDP_STRATEGIES = ("ddp", "zero1")  # those whose gradients DistributedDataParallel synchronizes
SHARDED_STRATEGIES = (
    "zero1",
    "fsdp",
)  # those that keep tensors in flat buffers, whose memory format is lost there
EQUAL_STRATEGIES = (
    *DDP_STRATEGIES,
    "own_ddp",
)  # those whose ranks keep equal parameters, for all_reduces add gradients up
GROUPED_STRATEGIES = (*EQUAL_STRATEGIES, "fsdp")
# What a graph cannot hold, and why.
NOT_CAPTURED = {
    "data_parallel": "which starts threads in every step",
    "fsdp": "whose parameters come and go in every step",
    "powersgd": "which waits for the device where it compresses",
}
DELAYED_HOOKS = ("none", "avg", "bf16", "fp16")  # which are short enough to be done in another way, too
DDP_OPTIONS: dict[str, str | int | bool] = {
    "comm_hook": "none",
    "bucket_cap_mb": DEFAULT_BUCKET_CAP_MB,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "buffer_sync": True,
}
OWN_DDP_OPTIONS = ("comm_hook", "bucket_cap_mb")
OWN_DDP_HOOKS = (
    "none",
    "symmetric_memory",
)  # the backend's all_reduce, or those in memory that all GPUs have mapped
# What takes a DDP step's communication apart: no options of a training that is to learn.
APART: dict[str, str | int | float] = {"communication": "on", "comm_delay_seconds": 0.0, "comm_delay_rank": 0}

_OPTION = r"[a-z_]\w*(\.[a-z_]\w*)*"  # of torch's inductor: a name, or one of a group


def options_of(strategy: str) -> tuple[str, ...]:
    """Those of DDP_OPTIONS that a strategy has."""
    if strategy == "own_ddp":
        return OWN_DDP_OPTIONS
    return tuple(DDP_OPTIONS) if strategy in DDP_STRATEGIES else ()


def require_strategy(spec: TrainingSpec) -> None:
    """Raise ValueError unless strategy, options and form are known and go together."""
    require_one_of("strategy", spec.strategy, get_args(Strategy))
    require_one_of("execution", spec.execution, get_args(Execution))
    require_one_of("comm_hook", spec.comm_hook, get_args(CommHook))
    require_at_least("bucket_cap_mb", spec.bucket_cap_mb, 0)
    require_at_least("accumulation_steps", spec.accumulation_steps, 1)
    if spec.bucket_cap_mb > MOST_BUCKET_CAP_MB:
        raise ValueError(f"bucket_cap_mb goes up to {MOST_BUCKET_CAP_MB}, got {spec.bucket_cap_mb}")
    _require_apart(spec)
    for name in ("gradient_as_bucket_view", "static_graph", "buffer_sync", "sync_batch_norm"):
        require_bool(name, getattr(spec, name))
    if not (isinstance(spec.inductor, str) and re.fullmatch(rf"({_OPTION}(\+{_OPTION})*)?", spec.inductor)):
        raise ValueError(
            f"inductor must be names of torch's inductor options joined by +, got {spec.inductor!r}"
        )
    _require_options(spec)
    _require_execution(spec)


def _require_options(spec: TrainingSpec) -> None:
    for name, default in DDP_OPTIONS.items():
        if (value := getattr(spec, name)) != default and name not in options_of(spec.strategy):
            raise ValueError(
                f"{name}={value} is an option of DDP, got strategy {spec.strategy}; use ddp or zero1, or leave it out"
            )
    if spec.strategy == "own_ddp" and spec.comm_hook not in OWN_DDP_HOOKS:
        raise ValueError(
            f"comm_hook={spec.comm_hook} is DDP's, got strategy own_ddp; use none or symmetric_memory"
        )
    if spec.sync_batch_norm and spec.strategy not in GROUPED_STRATEGIES:
        raise ValueError(
            f"sync_batch_norm needs a process group, got strategy {spec.strategy}; use ddp, own_ddp, zero1 or fsdp"
        )
    if spec.strategy == "fsdp" and spec.precision == "fp16":
        raise ValueError(
            "fp16's gradient scaler looks at a rank's own shard only, got strategy fsdp; use precision bf16"
        )
    if spec.strategy in SHARDED_STRATEGIES and spec.memory_format != "contiguous":
        raise ValueError(
            f"{spec.strategy} lays parameters one after the other, got {spec.memory_format}; use contiguous"
        )
    if spec.static_graph and spec.accumulation_steps > 1:
        raise ValueError(
            "static_graph does not know no_sync, got accumulation_steps above 1; leave one of them out"
        )


def _require_apart(spec: TrainingSpec) -> None:
    require_one_of("communication", spec.communication, get_args(Communication))
    require_at_least("comm_delay_rank", spec.comm_delay_rank, 0)
    require_delay("comm_delay_seconds", spec.comm_delay_seconds)
    for name, default in APART.items():
        if (value := getattr(spec, name)) != default and spec.strategy != "ddp":
            raise ValueError(
                f"{name}={value} takes DDP's communication apart, got strategy {spec.strategy}; use ddp"
            )
    if spec.comm_delay_rank >= spec.world_size:
        raise ValueError(
            f"comm_delay_rank={spec.comm_delay_rank} is none of {spec.world_size} ranks; name one of them"
        )
    for name, needed in (
        ("communication", spec.communication == "local"),
        ("comm_delay_seconds", bool(spec.comm_delay_seconds)),
    ):
        if needed and spec.comm_hook not in DELAYED_HOOKS:
            raise ValueError(
                f"{name}={getattr(spec, name)} cannot be told to hook {spec.comm_hook}; use none, avg or bf16"
            )


def _require_execution(spec: TrainingSpec) -> None:
    if spec.captured:
        for part in (spec.strategy, spec.comm_hook):
            if part in NOT_CAPTURED:
                raise ValueError(
                    f"form {spec.execution} cannot capture {part}, {NOT_CAPTURED[part]}; use form eager"
                )
        if spec.strategy == "zero1" and spec.precision == "fp16":
            raise ValueError(
                f"form {spec.execution} cannot capture fp16's scaler beside zero1, which waits for it; use bf16"
            )
    if spec.compiled and spec.strategy in ("data_parallel", "fsdp"):
        raise ValueError(f"form {spec.execution} cannot compile strategy {spec.strategy}; use form eager")
    if spec.inductor and not spec.compiled:
        raise ValueError(
            f"inductor={spec.inductor} needs form compile or compile+graph, got {spec.execution}"
        )


def gpu_reason(spec: TrainingSpec, device: str) -> str:
    """What of `spec` the CPU cannot do, in a sentence; empty if it can do it all, or if `device` is another."""
    if device != "cpu":
        return ""
    for needed, what in (
        (spec.captured, f"form {spec.execution} is captured by a GPU's driver"),
        (spec.strategy == "data_parallel", "strategy data_parallel drives several GPUs from one process"),
        (spec.comm_hook in ("avg", "powersgd"), f"comm_hook {spec.comm_hook} needs NCCL"),
        (spec.comm_hook == "symmetric_memory", "comm_hook symmetric_memory maps the memory of GPUs"),
        (spec.sync_batch_norm, "sync_batch_norm is there for GPUs alone"),
    ):
        if needed:
            return f"{what}; this runs on the CPU"
    return ""


def strategy_id(spec: TrainingSpec) -> str:
    """The strategy with what of its options is not the default: ddp+avg+bucket=4."""
    named = (
        (spec.comm_hook, spec.comm_hook != "none"),
        (f"bucket={spec.bucket_cap_mb}", spec.bucket_cap_mb != DEFAULT_BUCKET_CAP_MB),
        ("view", spec.gradient_as_bucket_view),
        ("static", spec.static_graph),
        ("no_buffer_sync", not spec.buffer_sync),
        ("sync_batch_norm", spec.sync_batch_norm),
        (spec.communication, spec.communication != "on"),
        (f"comm_delay={spec.comm_delay_seconds:g}s@{spec.comm_delay_rank}", spec.comm_delay_seconds > 0),
        (f"accumulate={spec.accumulation_steps}", spec.accumulation_steps > 1),
    )
    return "+".join([spec.strategy, *(name for name, is_set in named if is_set)])


def execution_id(spec: TrainingSpec) -> str:
    return "+".join(part for part in (spec.execution, spec.inductor) if part)
