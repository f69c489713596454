"""Forms of a step: what does one device gain when its step is compiled, captured in a graph, or both?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpperf.plugin.cells import Cell
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import TrainingSpec
from perf.metrics import speedup_over, training_metrics


def forms(options: Options) -> Iterator[Cell]:
    """What must be compiled for each batch size, for the least and the greatest only."""
    extremes = (min(options.batch_sizes), max(options.batch_sizes))
    for batch_size in options.batch_sizes:
        for form in dict.fromkeys(("eager", *options.forms)):
            step = options.step(world_size=1, per_rank_batch_size=batch_size, form=form, input=options.input)
            if not step.compiled or batch_size in extremes:
                yield step


@pytest.mark.specs(cells=forms)
def test_forms(measure: Measure, spec: TrainingSpec) -> None:
    step = measure(spec)
    if spec.form != "eager":
        speedup_over(measure, "eager", step, spec.eager())
    training_metrics(measure, step)
