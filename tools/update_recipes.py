"""Writes the best learning rate of each training recipe to perf/recipes.json.

The learning rates were measured by `pytest perf/learning_rates.py`. Pass the file of that test run:

    python -m tools.update_recipes .ddpperf/runs/<hardware>/NNNN_....json

Recipes that the test run did not measure keep their learning rates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ddpperf.specs import RunSpec, from_json
from perf.common.recipes import FOLDER, rate_id, read_recipes, tuned, tuning_seeds


def found(document: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the best learning rate of each training recipe, and the accuracy of every rate tried.

    The accuracy of a learning rate that failed is 0. Raises ValueError if the test run measured no
    recipe of this device type, or not all learning rates of a recipe.
    """
    measured: dict[RunSpec, float] = {}
    for benchmark in document["benchmarks"]:
        stored = benchmark["extra_info"]["ddpperf"]
        spec = from_json(stored["spec"])
        if benchmark["name"].startswith("test_rates[") and isinstance(spec, RunSpec):
            measured[spec] = stored["metrics"].get("test_accuracy", {"value": 0.0})["value"]
    failed = [
        test for test, outcome in document["ddpperf"]["outcomes"].items() if outcome["kind"] == "failed"
    ]
    rows: dict[str, dict[float, float]] = {}
    for recipe in [*read_recipes(device), *read_recipes(device, "long")]:
        runs = [
            spec for spec in measured if spec.rate in recipe.rates and recipe.like(spec, spec.rate) == spec
        ]
        if not runs:
            continue
        row = rows[recipe.name] = {spec.rate: measured[spec] for spec in runs}
        for rate in set(recipe.rates) - row.keys():
            if not any(test.endswith(f"[{rate_id(recipe, rate)}]") for test in failed):
                raise ValueError(
                    f"the run has {recipe.name!r} without its rate {rate:g}; run all rates of a recipe"
                )
            row[rate] = 0.0
    if not rows:
        raise ValueError(f"the run holds no recipe of {device}; make one by pytest perf/learning_rates.py")
    best = {name: max(row, key=row.__getitem__) for name, row in rows.items()}
    return {
        name: {
            "rate": best[name],
            "test_accuracy": row[best[name]],
            "seeds": tuning_seeds(device),
            "grid": {f"{rate:g}": row[rate] for rate in sorted(row)},
        }
        for name, row in rows.items()
    }


def main(path: str) -> None:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    device = "cpu" if document["ddpperf"]["environment"]["backend"] == "gloo" else "cuda"
    recipes = tuned()
    rows = found(document, device)
    recipes[device] = recipes.get(device, {}) | rows
    (FOLDER / "recipes.json").write_text(json.dumps(recipes, indent=2) + "\n")
    for name, row in rows.items():
        tried = sorted(map(float, row["grid"]))
        if row["rate"] in (tried[0], tried[-1]):
            print(f"{name}: the best rate {row['rate']:g} is at the edge of its grid; try a wider grid")


if __name__ == "__main__":
    main(sys.argv[1])
