"""Execution: how much faster is a training step when it is compiled or captured in a CUDA graph?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from ddpperf.plugin.cases import Case
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import TrainingSpec
from perf.common import core
from perf.common.training_metrics import speedup_over, training_metrics


def executions(options: Options) -> Iterator[Case]:
    """Yield single-device training specs for each batch size and execution mode.

    Compiled steps are measured at the smallest and the largest batch size only.
    """
    extremes = (min(options.batch_sizes), max(options.batch_sizes))
    for batch_size in options.batch_sizes:
        for execution in dict.fromkeys(("eager", *options.executions)):
            step = options.step(
                world_size=1, per_rank_batch_size=batch_size, execution=execution, input=options.input
            )
            if not step.compiled or batch_size in extremes:
                yield step


@pytest.mark.specs(cases=executions, core=core.execution)
def test_execution(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is a compiled or captured training step than the same step in eager mode?"""
    step = measure(spec)
    if spec.execution != "eager":
        eager = dataclasses.replace(spec, execution="eager", inductor="")
        speedup_over(measure, "eager", step, eager)
    training_metrics(measure, step)
