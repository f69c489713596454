"""The words of tables and pages for what a test measures, and for a training recipe."""

from __future__ import annotations

import pytest

from ddpperf.report.facets import in_words
from ddpperf.specs import RunSpec, ScheduleName
from tests.project import script

tables = script("tables")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("recipe", "64, warm-up", 'recipe "64, warm-up"'),
        ("batch", "32", "batch 32 per rank"),
        ("ranks", "1", "1 rank"),
    ],
)
def test_property_is_clear_in_a_list(name: str, value: str, words: str) -> None:
    assert in_words(name, value) == words


@pytest.mark.parametrize(
    ("plain", "schedule", "words"),
    [
        (True, "constant", "plain loop, rate 0.1"),
        (True, "linear", "plain loop, rate 0.1, linear decay"),
        (False, "constant", "sgd 0.1, momentum 0.9, decay 0.0005, constant rate"),
        (False, "linear", "sgd 0.1, momentum 0.9, decay 0.0005, linear decay"),
        (False, "multistep", "sgd 0.1, momentum 0.9, decay 0.0005, multi-step schedule"),
    ],
)
def test_description_of_a_recipe_names_its_schedule(plain: bool, schedule: ScheduleName, words: str) -> None:
    spec = RunSpec(
        world_size=1,
        strategy="single",
        per_rank_batch_size=16,
        epochs=4,
        test_images=16,
        input="device",
        rate=0.1,
        schedule=schedule,
        decay_vectors=plain,
        nesterov=not plain,
        warmup_epochs=0,
        recompute_statistics=False,
    )
    assert tables.work(spec) == words
