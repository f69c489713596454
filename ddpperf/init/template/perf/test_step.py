"""How much faster does the training step in step.py train on N devices than on one device?"""

import pytest

from ddpperf.analysis.scaling import efficiency, weak_speedup
from ddpperf.plugin.cases import case
from ddpperf.specs import CustomStepSpec


def cases(options):
    for world_size in reversed(options.world_sizes):
        for batch_size in options.batch_sizes:
            step = CustomStepSpec(
                function="perf.step:make_step", world_size=world_size, per_rank_batch_size=batch_size
            )
            yield case(step, gate=True)


@pytest.mark.specs(cases=cases)
def test_step(measure, spec):
    N = spec.world_size
    tN = measure(spec).median_step_seconds()  # the time of a step, by process set
    images = N * spec.per_rank_batch_size
    measure.metric("images_per_second", {name: images / t for name, t in tN.items()})
    if N > 1:
        t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(N)
        speedup = {name: weak_speedup(t1[name], tN[name], N) for name in tN}
        measure.metric("speedup", speedup)
        measure.metric("efficiency", {name: efficiency(speedup[name], N) for name in tN})
