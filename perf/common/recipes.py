"""Reads the training recipes in perf/recipes.toml and their tuned learning rates."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from ddpperf.errors import first_line
from ddpperf.io.files import read_text
from ddpperf.plugin.options.options import CIFAR_CLASSES, Options
from ddpperf.specs import RunSpec
from ddpperf.specs.whole_training import SGD_ONLY

FOLDER = Path(__file__).parents[1]
# From the ratio of two batch sizes to the ratio of their learning rates (Goyal et al. 2017, Krizhevsky 2014)
SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
# The kinds of recipes, and the table of perf/recipes.toml with their common values
KINDS = {"recipe": "tuned", "remedy": "plain", "report": "plain", "long": "tuned"}
OF_DATA = ("model", "epoch_images", "test_images")  # keys of [cpu] or [cuda], replaced by options
OF_RUN = ("epochs", "test_images", "rate", "set_epoch", "seed")  # fields of RunSpec that recipes do not set
DEFAULTS = {  # of the fields that a recipe sets
    field.name: field.default
    for field in dataclasses.fields(RunSpec)
    if field.name in RunSpec.__annotations__ and field.name not in OF_RUN
}
REPORTED = ("train_loss", "train_accuracy", "test_accuracy", "best_test_accuracy")  # by course reports
TABLES = ("cpu", "cuda", *KINDS, *KINDS.values())
KEYS = (
    *("name", "global_batch_size", "images_at_once", "devices", "epochs", "seeds", "tuning_seeds", "rate"),
    *("rates", "rate_of", "scale", *(f"reported_{name}" for name in REPORTED), *OF_DATA, *DEFAULTS),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe: one entry of perf/recipes.toml, with its learning rate.

    devices: the number of devices, or None for all devices. images_at_once: the images of a part of
    a batch on a device, or None to train on whole batches. model: the model that --model does not
    replace, or None. rates: the learning rates that tuning tries. data: the values of the keys in
    OF_DATA. fields: the other fields of a RunSpec. reported: losses and accuracies that course
    reports state, by metric.
    """

    name: str
    global_batch_size: int
    images_at_once: int | None
    devices: int | None
    model: str | None
    seeds: int
    rates: tuple[float, ...]
    rate: float
    data: Mapping[str, Any]
    fields: Mapping[str, Any]
    reported: Mapping[str, float]

    @property
    def id(self) -> str:
        """The name as part of a test id: "2048, LARS + warm-up" becomes "2048-LARS+warm-up"."""
        return self.name.replace(" + ", "+").replace(", ", "-").replace(" ", "-")

    def spec(self, options: Options, rate: float | None = None, seed: int = 0, **fields: Any) -> RunSpec:
        """Return the training spec of this recipe under the options of a test run.

        Raises ValueError if the batch size does not divide over the devices, or if the images have
        more classes than the model has outputs.
        """
        work = self._work(self.devices or max(options.world_sizes), rate)
        usual = options.model if "--model" in options.given else self.data.get("model", options.model)
        model, data = self.model or usual, options.data
        if model.endswith("_cifar") and data.classes > CIFAR_CLASSES:
            found = f"{CIFAR_CLASSES} outputs, {data.name} has {data.classes} classes"
            raise ValueError(f"the recipe's model {model} has {found}; use another data set or --model")
        most = {"epoch_images": options.epoch_images, "test_images": data.test_images}
        images = {name: min(number, self.data.get(name, number)) for name, number in most.items()}
        return options.run(model=model, **images, **work, seed=seed, **fields)

    def like(self, spec: RunSpec, rate: float | None = None) -> RunSpec:
        """Return this recipe's training spec with the images, model and devices of another spec.

        Batches are accumulated only if this recipe does so.
        """
        world_size = self.devices or spec.world_size
        alike = spec.one_device() if world_size == 1 else spec
        assert isinstance(alike, RunSpec)
        work = {"accumulation_steps": 1, **self._work(world_size, rate)}
        return dataclasses.replace(alike, **work, model=self.model or spec.model)

    def _work(self, world_size: int, rate: float | None) -> dict[str, Any]:
        for what, images in (("batch", self.global_batch_size), ("grow_from", self.fields["grow_from"])):
            if images % world_size:
                raise ValueError(f"{what} {images} does not divide over {world_size} devices; use a divisor")
        batch_size = self.global_batch_size // world_size
        at_once = self.images_at_once or batch_size
        if batch_size % at_once:
            parts = f"parts of {at_once} images; use a divisor"
            raise ValueError(f"batch {batch_size} per device does not divide into {parts}")
        return {
            **self.fields,
            "grow_from": self.fields["grow_from"] // world_size,
            "world_size": world_size,
            "per_rank_batch_size": batch_size,
            "rate": rate or self.rate,
            **({"accumulation_steps": batch_size // at_once} if self.images_at_once else {}),
        }


def read_recipes(device: str, kind: str = "recipe") -> list[Recipe]:
    """Read the training recipes for a device type ("cpu" or "cuda") from perf/recipes.toml.

    kind: a key of KINDS. Raises ValueError for an entry that is no recipe.
    """
    document = _read("recipes.toml", tomllib.loads)
    for name in document.keys() - {*TABLES}:
        raise ValueError(f"recipes.toml has the unknown table {name!r}; correct or remove it")
    recipes: dict[str, Recipe] = {}
    for row in _rows(document[device].get(kind) or document.get(kind, []), device):
        try:
            recipe = _recipe(row, document[device], document[KINDS[kind]], recipes, tuned().get(device, {}))
        except (KeyError, ValueError, TypeError) as error:
            what = f"recipe {row.get('name', len(recipes) + 1)!r} of {device} in recipes.toml"
            why = f"has no {error}; add it" if isinstance(error, KeyError) else f"is wrong: {error}"
            raise ValueError(f"{what} {why}") from error
        recipes[recipe.name] = recipe
    return list(recipes.values())


def _rows(table: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Return the rows of a kind for a device type, in which each row has one batch size.

    A row with `batch_sizes` stands for several rows, and may have other values for each batch size.
    These rows follow the other rows, in the order of their batch sizes.
    """
    rows = [row for row in table if "batch_sizes" not in row]
    sized = [(size, row) for row in table for size in row.get("batch_sizes", {}).get(device, ())]
    for size, row in sorted(sized, key=itemgetter(0)):
        found = {"global_batch_size": size, "name": row["name"].format(size)}
        for key, value in row.items():
            if isinstance(value, dict) and all(map(str.isdigit, value)):  # by batch size
                value = value.get(str(size))
            if value is not None and key != "batch_sizes":
                found.setdefault(key, value)
        rows.append(found)
    return rows


def _recipe(
    row: Mapping[str, Any],
    of_device: Mapping[str, Any],
    common: Mapping[str, Any],
    earlier: Mapping[str, Recipe],
    tuned: Mapping[str, Any],
) -> Recipe:
    """Return the recipe of a row in perf/recipes.toml.

    of_device, common: values of all recipes of the device type and of the kind. earlier: the
    recipes above the row, whose learning rates it may use. tuned: the tuning results by recipe.
    """
    values = {key: value for key, value in of_device.items() if key not in KINDS} | {**common, **row}
    for name in values.keys() - {*KEYS}:  # it would change nothing
        raise ValueError(f"the key {name!r} is unknown; correct or remove it")
    fields = {name: value for name, value in values.items() if name in DEFAULTS}
    if fields.get("optimizer", "sgd") != "sgd":  # other optimizers have none of SGD's options
        fields = {name: value for name, value in fields.items() if name in row or name not in SGD_ONLY}
    size, rates = row["global_batch_size"], tuple(map(float, row.get("rates", ())))
    if "rate_of" in values:
        if (other := earlier.get(values["rate_of"])) is None:
            found = f"rate_of is {values['rate_of']!r}"
            raise ValueError(f"{found}, but no earlier recipe of this kind has this name")
        scale = SCALES[values["scale"]](size / other.global_batch_size) if "scale" in values else 1.0
        rate = other.rate * scale
    else:
        rate = float(tuned.get(row["name"], {"rate": rates[0]})["rate"] if rates else values["rate"])
    return Recipe(
        name=row["name"],
        global_batch_size=size,
        images_at_once=row.get("images_at_once"),
        devices=row.get("devices"),
        model=row.get("model"),
        seeds=values["seeds"],
        rates=rates,
        rate=rate,
        data={name: of_device[name] for name in OF_DATA if name in of_device},
        fields={**DEFAULTS, **fields, "epochs": values["epochs"]},
        reported={
            f"reported_{name}_{report}": accuracy
            for name in REPORTED
            for report, accuracy in row.get(f"reported_{name}", {}).items()
        },
    )


def find_recipe(device: str, name: str) -> Recipe:
    """Return the training recipe with the given name, of any kind."""
    recipes = [recipe for kind in KINDS for recipe in read_recipes(device, kind)]
    return next(recipe for recipe in recipes if recipe.name == name)


def rate_id(recipe: Recipe, rate: float) -> str:
    """Return the test id of a training recipe at one learning rate: "2048-LARS-rate=10"."""
    return f"{recipe.id}-rate={rate:g}"


def of_recipe(recipe: Recipe, found: ParameterSet) -> ParameterSet:
    """Return a test case that trains with a recipe, whose name is stored."""
    return pytest.param(*found.values, id=found.id, marks=[*found.marks, pytest.mark.recipe(recipe.name)])


def tuning_seeds(device: str) -> int:
    """Return the number of random seeds for each learning rate that tuning tries."""
    return int(_read("recipes.toml", tomllib.loads)[device]["tuning_seeds"])


def tuned() -> dict[str, Any]:
    """Return the tuning results in perf/recipes.json, or an empty dict if the file does not exist.

    The result of each device type and recipe has the best learning rate and the test accuracy of
    every learning rate that was tried.
    """
    return _read("recipes.json", json.loads) if (FOLDER / "recipes.json").exists() else {}


def _read(name: str, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        return parse(read_text(FOLDER / name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read ({first_line(error)}); correct or restore it") from error
