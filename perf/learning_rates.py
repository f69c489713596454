"""Learning rates: which one is the best for each training recipe in perf/recipes.toml?

pytest collects this file only if it is named: pytest perf/learning_rates.py. tools/update_recipes.py writes
the best learning rates to perf/recipes.json.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpperf.plugin.cases import Case, case, if_valid
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import RunSpec
from perf.common.recipes import of_recipe, rate_id, read_recipes, tuning_seeds
from perf.common.seeds import by_seed
from perf.test_large_batch import learned

FIRST_SEED = 1000  # not a seed of the tests, because the best of several rates is partly luck


def grid(options: Options) -> Iterator[Case]:
    """Yield a training spec for every training recipe and every learning rate that tuning tries."""
    for kind, execution in (("recipe", options.executions[0]), ("long", options.fastest_execution)):
        for recipe in read_recipes(options.device, kind):
            for rate in recipe.rates:
                identity = rate_id(recipe, rate)
                training = if_valid(
                    identity, recipe.spec, options, rate, seed=FIRST_SEED, execution=execution
                )
                yield of_recipe(recipe, case(training, id=identity))


@pytest.mark.specs(cases=grid)
def test_rates(measure: Measure, spec: RunSpec) -> None:
    """Which test accuracy does a training recipe reach at one learning rate?

    If the loss becomes NaN, the test fails and the learning rate is not chosen.
    """
    learned(measure, by_seed(measure, spec, tuning_seeds(measure.machine.device)))
