"""A custom model is measured as the built-in ones are."""

from __future__ import annotations

import pytest

from tests.project import Project

MODEL = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def frozen_in_part():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model, lambda size: (torch.randn(size, 4), torch.randint(2, (size,))), cross_entropy
"""

EXPERIMENT = """
import pytest

def steps(options):
    for world_size in options.world_sizes:
        yield options.step(world_size=world_size, per_rank_batch_size=8)

def epochs(options):
    yield options.epoch(world_size=1, per_rank_batch_size=8)

@pytest.mark.specs(cases=steps)
def test_step(measure, spec):
    measure(spec)

@pytest.mark.specs(cases=epochs)
def test_epoch(measure, spec):
    measure(spec)
"""


@pytest.mark.slow
def test_custom_model_is_measured(project: Project) -> None:
    (project.root / "own_models.py").write_text(MODEL)
    project.experiment.write_text(EXPERIMENT)
    run = project.run("perf", "--model", "own_models:frozen_in_part", "--world-sizes", "1,2", "--rounds", "1")
    run.assert_one_sentence(0, "PASS: 3 tests measured")
    measured = list(project.measured().values())
    assert {stored["spec"]["model"] for stored in measured} == {"own_models:frozen_in_part"}
    found = {(stored["spec"]["measurement"], stored["spec"]["world_size"]): stored for stored in measured}
    assert found.keys() == {("training_step", 1), ("training_step", 2), ("training_epoch", 1)}
    alone, together = (found["training_step", size]["samples"][0]["counters"] for size in (1, 2))
    assert list(alone) == ["loss_after_5_steps", "cpu_seconds"]
    assert together["gradient_bytes"] == [40.0, 40.0], "of the 10 parameters that are trained"
