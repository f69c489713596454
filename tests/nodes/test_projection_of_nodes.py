"""perf/test_projection.py predicts 4 nodes from 2 and 3, each a network namespace with one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.namespaces import needs_namespaces
from tests.nodes.suite import UNDISTURBED, run_on_nodes

# The step mostly sends gradients, because the ranks of all nodes share the cores of this machine.
MODEL = "tests.nodes.wide_model:wide"
OPTIONS = (
    *("perf/test_projection.py", "--world-sizes=1,2,3,4", "--rounds=5"),
    *(f"--model={MODEL}", "--batch-sizes=8", "--buffer-sizes=64KiB,1MiB,4MiB,16MiB"),
)
SECONDS = 280
Figure = Callable[[str, Callable[[], float], float, str], None]


@pytest.mark.figures
@needs_namespaces
def test_two_and_three_nodes_predict_a_step_on_four(figure: Figure, tmp_path: Path) -> None:
    """The figure is the larger relative error of the step and of the all-reduce of each size."""

    def worst() -> float:
        stored, _ = run_on_nodes(
            tmp_path,
            OPTIONS,
            count=4,
            node_size=1,
            seconds=SECONDS,
            before=UNDISTURBED,
            delay_seconds=1e-3,
            bytes_per_second=1e9 / 8,
        )
        (test,) = stored["benchmarks"]
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        value: dict[str, float] = {name: metric["value"] for name, metric in metrics.items()}
        step: float = test["stats"]["median"]
        predicted = step - value["excess_seconds"] + value["projected_excess_on_4"]
        errors = {"step": predicted / step - 1}
        errors |= {
            name: found - 1 for name, found in value.items() if name.startswith("projected_over_measured_")
        }
        print(f"step of {step * 1e3:.0f} ms, {predicted * 1e3:.0f} ms predicted; errors {errors}")
        return max(abs(error) for error in errors.values())

    figure("a step and all-reduces on 4 nodes, from what 2 and 3 nodes predict", worst, 0.15, "")
