"""Reads the training recipes in perf/recipes.toml and their tuned learning rates."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.plugin.options.options import Options
from ddpperf.specs import RunSpec

FOLDER = Path(__file__).parents[1]
# From the ratio of two batch sizes to the ratio of their learning rates (Goyal et al. 2017, Krizhevsky 2014)
SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
OF_DATA = ("model", "epoch_images", "test_images")  # keys of [cpu] or [cuda], replaced by options
OF_RECIPE = (
    *("optimizer", "momentum", "weight_decay", "schedule", "warmup_epochs"),
    *("label_smoothing", "cutout", "clip_norm", "grow_from", "recompute_statistics"),
)
OF_ROW = ("name", "global_batch_size", "devices", "epochs", "rates", "rate_of", "scale")
DEFAULTS = {field.name: field.default for field in dataclasses.fields(RunSpec) if field.name in OF_RECIPE}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe: one entry of perf/recipes.toml, with its learning rate.

    devices: the number of devices, or None for all devices. rates: the learning rates that tuning
    tries. data: the values of the keys in OF_DATA. fields: the other fields of a RunSpec.
    """

    name: str
    global_batch_size: int
    devices: int | None
    rates: tuple[float, ...]
    rate: float
    data: Mapping[str, Any]
    fields: Mapping[str, Any]

    def spec(self, options: Options, rate: float | None = None, seed: int = 0, **fields: Any) -> RunSpec:
        """Return the training spec of this recipe under the options of a test run.

        Raises ValueError if the batch size does not divide over the devices.
        """
        world_size = self.devices or max(options.world_sizes)
        if self.global_batch_size % world_size or self.fields["grow_from"] % world_size:
            raise ValueError(
                f"batch {self.global_batch_size} does not divide over {world_size} devices; use a divisor"
            )
        model = options.model if "--model" in options.given else self.data.get("model", options.model)
        images = {
            "model": model,
            "epoch_images": min(options.epoch_images, self.data.get("epoch_images", options.epoch_images)),
            "test_images": min(
                options.data.test_images, self.data.get("test_images", options.data.test_images)
            ),
        }
        return options.run(**images, **self._work(world_size, rate), seed=seed, **fields)

    def like(self, spec: RunSpec, rate: float | None = None) -> RunSpec:
        """Return this recipe's training spec with the images, model and devices of another spec."""
        world_size = self.devices or spec.world_size
        alike = spec.one_device() if world_size == 1 else spec
        assert isinstance(alike, RunSpec)
        return dataclasses.replace(alike, **self._work(world_size, rate))

    def _work(self, world_size: int, rate: float | None) -> dict[str, Any]:
        fields = {**self.fields, "grow_from": self.fields["grow_from"] // world_size}
        per_rank_batch_size = self.global_batch_size // world_size
        return {
            **fields,
            "world_size": world_size,
            "per_rank_batch_size": per_rank_batch_size,
            "rate": rate or self.rate,
        }


def read_recipes(device: str, kind: str = "recipe") -> list[Recipe]:
    """Read the training recipes for a device type ("cpu" or "cuda") from perf/recipes.toml.

    kind: "recipe" for the short recipes, "long" for the long ones. Raises ValueError for an unknown
    key.
    """
    document = _document(device)
    data = {name: document[name] for name in OF_DATA if name in document}
    tuned_rates = {name: found["rate"] for name, found in tuned().get(device, {}).items()}
    recipes: dict[str, Recipe] = {}
    for row in document.get(kind, ()):
        name, batch, grid = row["name"], row["global_batch_size"], tuple(map(float, row.get("rates", ())))
        if unknown := sorted(row.keys() - {*OF_ROW, *OF_RECIPE}):
            raise ValueError(
                f"recipe {name!r} of {device} has the unknown key {unknown[0]!r}; correct it in recipes.toml"
            )
        if "rate_of" in row:
            other = recipes[row["rate_of"]]
            scale = SCALES[row["scale"]](batch / other.global_batch_size) if "scale" in row else 1.0
            rate = other.rate * scale
        else:
            rate = tuned_rates.get(name, grid[0])
        fields = {**DEFAULTS, "epochs": row.get("epochs", document["epochs"])}
        fields |= {
            field: value for part in (document, row) for field, value in part.items() if field in OF_RECIPE
        }
        recipes[name] = Recipe(
            name=name,
            global_batch_size=batch,
            devices=row.get("devices"),
            rates=grid,
            rate=float(rate),
            data=data,
            fields=fields,
        )
    return list(recipes.values())


def rate_id(recipe: Recipe, rate: float) -> str:
    """Return the test id of a training recipe at one learning rate: "small batch, rate=0.1"."""
    return f"{recipe.name}, rate={rate:g}"


def seeds_of(device: str, kind: str = "seeds") -> int:
    """Return the number of random seeds that each training recipe is trained with.

    kind: "seeds" for short recipes, "long_seeds" for long recipes, and "tuning_seeds" for each
    learning rate that tuning tries.
    """
    return int(_document(device)[kind])


def _document(device: str) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((FOLDER / "recipes.toml").read_text())[device]
    return document


def tuned() -> dict[str, Any]:
    """Return the tuning results in perf/recipes.json, or an empty dict if the file does not exist.

    The result of each device type and recipe has the best learning rate and the test accuracy of
    every learning rate that was tried.
    """
    path = FOLDER / "recipes.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
