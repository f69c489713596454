"""Execution: how much faster is a training step when it is compiled or captured in a CUDA graph?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from ddpperf.plugin.cases import Case, case
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import TrainingSpec
from ddpperf.specs.training_step import COMPILED_EXECUTIONS
from perf.common.step_metrics import speedup_over, training_metrics
from perf.common.step_specs import step_case


def executions(options: Options) -> Iterator[Case]:
    """Yield single-device training specs for each batch size and execution mode.

    Compiled steps are measured at the smallest and the largest batch size only. Compiling takes
    20 s on a GPU in the first run, so the core suite compiles only the largest batch. If the first
    mode is not eager, the other modes are compared with the eager step, and the core suite has the
    eager step of the smallest batch only.
    """
    extremes = (min(options.batch_sizes), max(options.batch_sizes))
    for batch_size in options.batch_sizes:
        for execution in dict.fromkeys(("eager", *options.executions)):
            if execution not in COMPILED_EXECUTIONS or batch_size in extremes:
                extreme = min(extremes) if execution == "eager" else max(extremes)
                core = execution == options.executions[0] or batch_size == extreme
                yield case(step_case(options, 1, batch_size, execution), core=core)


@pytest.mark.specs(cases=executions)
def test_execution(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is a compiled or captured training step than the same step in eager mode?"""
    step = measure(spec)
    if spec.execution != "eager":
        eager = dataclasses.replace(spec, execution="eager", inductor="")
        speedup_over(measure, "eager", step, eager)
    training_metrics(measure, step)
