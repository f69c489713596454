"""Precision: how long is a training step in fp32, tf32, bf16 or fp16, and what is its loss?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpperf.machine.hardware import computes_bf16
from ddpperf.plugin.cases import Case, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Precision, TrainingSpec
from perf.common import core, gate
from perf.common.training_metrics import training_metrics

GPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
CPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SLOW_BF16 = (
    "this CPU has no bf16 instructions, so a step takes tens of times as long; --precision bf16 measures it"
)


def precisions(options: Options) -> Iterator[Case]:
    """Yield a single-device training spec for each precision of the device and each batch size."""
    emulated = {"bf16"} - {options.precision} if options.device == "cpu" and not computes_bf16() else set()
    for precision in GPU_PRECISIONS if options.device == "cuda" else CPU_PRECISIONS:
        for batch_size in options.batch_sizes:
            spec = options.step(world_size=1, per_rank_batch_size=batch_size, precision=precision)
            yield skipped(spec, SLOW_BF16) if precision in emulated else spec


@pytest.mark.specs(cases=precisions, gate=gate.reduced_precision, core=core.precision)
def test_precision(measure: Measure, spec: TrainingSpec) -> None:
    """How long is a training step in one precision, and what is the loss after five steps?"""
    step = measure(spec)
    training_metrics(measure, step)
    measure.metric("loss_after_5_steps", step.counter("loss_after_5_steps"))
