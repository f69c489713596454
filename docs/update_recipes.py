"""Make perf/recipes.json of a run of perf/tuning.py: of each recipe the accuracy by rate, and the rate that reached most.

    PYTHONPATH=. python docs/update_recipes.py .ddpperf/runs/<hardware>/NNNN_....json

What the file says of another device, or of recipes that the run has not, stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ddpperf.specs import RunSpec, from_json
from perf.recipes import FOLDER, read_recipes, seeds_of, tuned


def found(document: dict[str, Any], device: str) -> dict[str, Any]:
    """By recipe the best rate, its accuracy, and the accuracy by rate; raises ValueError if the run has none of this device."""
    rows: dict[str, dict[float, float]] = {}
    for each in document["benchmarks"]:
        stored = each["extra_info"]["ddpperf"]
        spec = from_json(stored["spec"])
        if isinstance(spec, RunSpec):
            for recipe in (*read_recipes(device), *read_recipes(device, "long")):
                if spec.rate in recipe.rates and recipe.like(spec, spec.rate) == spec:
                    rows.setdefault(recipe.name, {})[spec.rate] = stored["metrics"]["test_accuracy"]["value"]
    if not rows:
        raise ValueError(f"the run holds no recipe of {device}; make one by pytest perf/tuning.py")
    best = {name: max(row, key=row.__getitem__) for name, row in rows.items()}
    return {
        name: {
            "rate": best[name],
            "test_accuracy": row[best[name]],
            "seeds": seeds_of(device, "tuning_seeds"),
            "grid": {f"{rate:g}": row[rate] for rate in sorted(row)},
        }
        for name, row in rows.items()
    }


def main(path: str) -> None:
    document = json.loads(Path(path).read_text())
    device = "cpu" if document["ddpperf"]["environment"]["backend"] == "gloo" else "cuda"
    recipes = tuned()
    recipes[device] = recipes.get(device, {}) | found(document, device)
    (FOLDER / "recipes.json").write_text(json.dumps(recipes, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
