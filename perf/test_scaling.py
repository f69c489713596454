"""Weak scaling: with the batch per device constant, how much more do N devices train than one?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpperf.analysis.scaling import efficiency, weak_speedup
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import Strategy, TrainingSpec


def weak_scaling(options: Options) -> Iterator[TrainingSpec]:
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            strategy: Strategy = "single" if world_size == 1 else "ddp"
            yield TrainingSpec(world_size=world_size, per_rank_batch_size=batch_size, strategy=strategy)


@pytest.mark.specs(cells=weak_scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    tN = measure(spec).median_step_seconds()
    global_batch_size = spec.world_size * spec.per_rank_batch_size
    if spec.world_size > 1:
        t1 = measure.leg("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)
        speedup = {name: weak_speedup(t1[name], tN[name], spec.world_size) for name in tN}
        measure.metric("speedup", "1", speedup)
        measure.metric("efficiency", "1", {name: efficiency(speedup[name], spec.world_size) for name in tN})
    measure.metric("images_per_second", "1/s", {name: global_batch_size / tN[name] for name in tN})
