"""How fast does your own training script train, as it is?

python -m pytest perf/test_script.py --script "torchrun --nproc-per-node {ranks} train.py"
"""

import pytest

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.scripts import script_metrics, scripts
from ddpperf.specs import ScriptSpec


@pytest.mark.specs(cases=scripts)
def test_script(measure: Measure, spec: ScriptSpec) -> None:
    """How long is a step of the script of --script?"""
    script_metrics(measure, measure(spec))
