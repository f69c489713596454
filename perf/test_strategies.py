"""Strategies: which DDP option or other parallel strategy is faster than plain DDP?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpperf.plugin.cases import Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import TrainingSpec
from ddpperf.specs.training_step import DDP_OPTIONS, NOT_CAPTURED
from perf.common.step_metrics import speedup_over, training_metrics
from perf.common.step_specs import step_case

CPU_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"comm_hook": "bf16"},
    {"strategy": "own_ddp"},
    {"strategy": "zero1"},
    {"strategy": "fsdp"},
)
SELDOM_USED: tuple[dict[str, Any], ...] = (  # not in the core suite of GPUs
    {"comm_hook": "fp16"},
    {"comm_hook": "powersgd"},
    {"comm_hook": "symmetric_memory"},
    {"comm_hook": "symmetric_memory", "bucket_cap_mb": 8},
    {"static_graph": True},
    {"sync_batch_norm": True},
)
GPU_VARIANTS: tuple[dict[str, Any], ...] = (
    *CPU_VARIANTS,
    *SELDOM_USED,
    {"comm_hook": "avg"},
    {"strategy": "own_ddp", "comm_hook": "symmetric_memory"},
    {"bucket_cap_mb": 4},
    {"gradient_as_bucket_view": True},
    {"buffer_sync": False},
    {"accumulation_steps": 2},
)


def variants(options: Options) -> Iterator[Case]:
    """Yield a training spec on all devices for each DDP option and parallel strategy.

    A step that a CUDA graph cannot capture is eager. The gate has the first mode of --executions,
    without this project's own DDP. On a CPU the gate leaves out FSDP, whose step time differs too
    much between process sets.
    """
    N, batch_size = max(options.world_sizes), options.batch_sizes[len(options.batch_sizes) // 2]
    on_cpu, first = options.device == "cpu", options.executions[0]
    if N == 1:
        yield skipped(size_id(options, 1), "strategies need two ranks or more; pass --world-sizes 1,2")
    elif options.spec_fields:
        yield skipped(
            "chosen", f"--spec sets {', '.join(options.spec_fields)}; leave it out to compare strategies"
        )
    else:
        for fields in CPU_VARIANTS if on_cpu else GPU_VARIANTS:
            execution = "eager" if set(NOT_CAPTURED).intersection(fields.values()) else first
            named = "+".join(f"{name}={value}" for name, value in fields.items()) or "ddp"
            name = f"b{batch_size}-{named}"
            step = step_case(options, N, batch_size, execution, name=name, **(DDP_OPTIONS | fields))
            left_out = ("own_ddp", "fsdp") if on_cpu else ("own_ddp",)
            gate = execution == first and fields.get("strategy") not in left_out
            yield case(step, core=on_cpu or fields not in SELDOM_USED, gate=gate)


@pytest.mark.specs(cases=variants)
def test_strategies(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is a training step than the same step with plain DDP?"""
    step = measure(spec)
    ddp = spec.ddp()
    if spec != ddp:
        speedup_over(measure, "ddp", step, ddp)
    training_metrics(measure, step)
