"""Every recipe with every rate of its grid. pytest collects this file only by its name: pytest perf/tuning.py.

tools/update_recipes.py makes perf/recipes.json of such a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ddpperf.plugin.cases import Case, if_valid, named
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import RunSpec
from perf.common.recipes import rate_id, read_recipes
from perf.test_large_batch import by_seed, learned

FIRST_SEED = 1000  # others than those that are measured: the best of several is better than it will be again


def grid(options: Options) -> Iterator[Case]:
    for kind, execution in (("recipe", options.executions[0]), ("long", options.fastest_form)):
        for recipe in read_recipes(options.device, kind):
            for rate in recipe.rates:
                spec = partial(recipe.spec, options, rate, seed=FIRST_SEED, execution=execution)
                identity = rate_id(recipe, rate)
                yield named(identity, if_valid(identity, spec))


@pytest.mark.specs(cases=grid)
def test_rates(measure: Measure, spec: RunSpec) -> None:
    """A rate at which the loss turns NaN fails here, and is not chosen."""
    learned(measure, by_seed(measure, spec, "tuning_seeds"))
