"""Reads the training recipes in perf/recipes.toml and their tuned learning rates."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from ddpperf.data.cache import Data
from ddpperf.errors import first_line, quoted
from ddpperf.io.files import read_text
from ddpperf.plugin.cases import Case
from ddpperf.plugin.options.options import CIFAR_CLASSES, Options
from ddpperf.specs import RunSpec, Spec
from ddpperf.specs.run import SGD_ONLY

FOLDER = Path(__file__).parents[1]
# From the ratio of two batch sizes to the ratio of their learning rates (Goyal et al. 2017, Krizhevsky 2014)
SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
# The kinds of recipes, and the table of perf/recipes.toml with their common values
KINDS = {"recipe": "tuned", "remedy": "plain", "report": "plain", "long": "tuned"}
OF_DATA = ("model", "epoch_images", "test_images")  # keys of [cpu] or [cuda], replaced by options
OF_RECIPE = (
    *("optimizer", "momentum", "nesterov", "weight_decay", "decay_vectors", "schedule", "warmup_epochs"),
    *("label_smoothing", "cutmix", "crop_padding", "uncropped_epochs", "clip_norm", "grow_from"),
    *("recompute_statistics", "average_weights", "may_diverge"),
)
DEFAULTS = {field.name: field.default for field in dataclasses.fields(RunSpec) if field.name in OF_RECIPE}
OF_DEVICE = (*OF_DATA, "epochs", "seeds", "tuning_seeds")  # of [cpu] and [cuda]
OF_RATE = ("rate", "rates", "rate_of")  # a recipe has one of these
IMAGENET_CLASSES = 1000


def _is_whole(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(str(value)) < math.inf


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _are_accuracies(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(part) and part <= 1 for part in value.values())


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


# The keys that are no fields of RunSpec: the check of a value, and what it accepts
CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_text, "a text of one line"),
    "global_batch_size": (_is_whole, "a whole number of at least 1"),
    "images_at_once": (_is_whole, "a whole number of at least 1"),
    "devices": (_is_whole, "a whole number of at least 1"),
    "model": (_is_text, "the name of a model"),
    "epochs": (_is_whole, "a whole number of at least 1"),
    "epoch_images": (_is_whole, "a whole number of at least 1"),
    "test_images": (_is_whole, "a whole number of at least 1"),
    "seeds": (_is_whole, "a whole number of at least 1"),
    "tuning_seeds": (_is_whole, "a whole number of at least 1"),
    "rate": (_is_number, "a number above 0"),
    "rates": (_are_numbers, "a list of numbers above 0"),
    "rate_of": (_is_text, "the name of a recipe"),
    "scale": (lambda value: value in tuple(SCALES), "linear or sqrt"),
    "reported_train_accuracy": (_are_accuracies, "fractions by report, such as { A = 0.85 }"),
    "reported_test_accuracy": (_are_accuracies, "fractions by report, such as { A = 0.85 }"),
}
RECIPE_KEYS = [*(name for name in CHECKS if name not in (*OF_DATA, "tuning_seeds")), "model", *OF_RECIPE]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe: one entry of perf/recipes.toml, with its learning rate.

    devices: the number of devices, or None for all devices. images_at_once: the images of a part of
    a batch on a device, or None to train on whole batches. model: the model that --model does not
    replace, or None. rates: the learning rates that tuning tries. data: the values of the keys in
    OF_DATA. fields: the other fields of a RunSpec. reported: accuracies that course reports state,
    by metric and report.
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
    reported: Mapping[str, Mapping[str, float]]

    @property
    def id(self) -> str:
        """The name as part of a test id: "2048, LARS + warm-up" becomes "2048-LARS+warm-up"."""
        return self.name.replace(" + ", "+").replace(", ", "-").replace(" ", "-")

    def spec(self, options: Options, rate: float | None = None, seed: int = 0, **fields: Any) -> RunSpec:
        """Return the training spec of this recipe under the options of a test run.

        Raises ValueError if the batch size does not divide over the devices, or if the images have
        more classes than the model has outputs.
        """
        world_size = self.devices or max(options.world_sizes)
        model = options.model if "--model" in options.given else self.data.get("model", options.model)
        model = self.model or model
        require_outputs(model, options.data)
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
        work = self._work(world_size, rate)
        return dataclasses.replace(alike, **work, model=self.model or spec.model)

    def reported_losses(self, small: Recipe) -> list[tuple[str, str, float]]:
        """Return the accuracy that reports lost by this batch size, against a recipe with a small one.

        Each part has the metric's name, the report, and the fraction that it lost.
        """
        return [
            (name, report, small.reported[name][report] - accuracy)
            for name, by_report in self.reported.items()
            for report, accuracy in by_report.items()
            if report in small.reported.get(name, {})
        ]

    def _work(self, world_size: int, rate: float | None) -> dict[str, Any]:
        for what, images in (("batch", self.global_batch_size), ("grow_from", self.fields["grow_from"])):
            if images % world_size:
                raise ValueError(f"{what} {images} does not divide over {world_size} devices; use a divisor")
        per_rank_batch_size = self.global_batch_size // world_size
        found = {
            **self.fields,
            "grow_from": self.fields["grow_from"] // world_size,
            "world_size": world_size,
            "per_rank_batch_size": per_rank_batch_size,
            "rate": rate or self.rate,
        }
        if self.images_at_once is not None:
            if per_rank_batch_size % self.images_at_once:
                parts = f"parts of {self.images_at_once} images; use a divisor"
                raise ValueError(f"batch {per_rank_batch_size} per device does not divide into {parts}")
            found["accumulation_steps"] = per_rank_batch_size // self.images_at_once
        return found


def require_outputs(model: str, data: Data) -> None:
    """Raise ValueError if a data set has more classes than a model has outputs.

    A model with more outputs than classes learns not to use the other outputs.
    """
    outputs = CIFAR_CLASSES if model.endswith("_cifar") else IMAGENET_CLASSES
    if data.classes > outputs:
        found = f"{outputs} outputs, {data.name} has {data.classes} classes"
        raise ValueError(f"the recipe's model {model} has {found}; use another data set or --model")


def read_recipes(device: str, kind: str = "recipe") -> list[Recipe]:
    """Read the training recipes for a device type ("cpu" or "cuda") from perf/recipes.toml.

    kind: a key of KINDS. Raises ValueError for a recipe that cannot be trained on any machine.
    """
    document = _document()
    of_device, common = document[device], document[KINDS[kind]]
    tuned_rates = {name: found["rate"] for name, found in tuned().get(device, {}).items()}
    names = [row.get("name") for other in KINDS for row in of_device.get(other, ())]
    recipes: dict[str, Recipe] = {}
    for row in of_device.get(kind, ()):
        what = f"recipe {row.get('name', len(recipes) + 1)!r} of {device} in recipes.toml"
        _check(row, what, RECIPE_KEYS, ("name", "global_batch_size"))
        if names.count(row["name"]) > 1:
            raise ValueError(f"{what} stands there twice; rename one")
        values = {"epochs": of_device["epochs"], "seeds": of_device["seeds"]} | common | row
        if len(rates := [name for name in OF_RATE if name in row]) > 1:
            raise ValueError(f"{what} has {' and '.join(rates)}, which exclude each other; remove one")
        if "scale" in row and "rate_of" not in row:
            raise ValueError(f"{what} has scale, but no rate_of that it scales; add rate_of")
        if rates:
            values = {name: value for name, value in values.items() if name not in OF_RATE or name in rates}
        recipe = Recipe(
            name=row["name"],
            global_batch_size=row["global_batch_size"],
            images_at_once=row.get("images_at_once"),
            devices=row.get("devices"),
            model=row.get("model"),
            seeds=values["seeds"],
            rates=tuple(map(float, row.get("rates", ()))),
            rate=float(_rate(values, recipes, tuned_rates, what)),
            data={name: of_device[name] for name in OF_DATA if name in of_device},
            fields={**DEFAULTS, **_fields(values, row), "epochs": values["epochs"]},
            reported={
                name: row[f"reported_{name}"]
                for name in ("train_accuracy", "test_accuracy")
                if f"reported_{name}" in row
            },
        )
        _require_trainable(recipe, what)
        recipes[recipe.name] = recipe
    return list(recipes.values())


def find_recipe(device: str, name: str) -> Recipe:
    """Return the training recipe with the given name, of any kind."""
    recipes = [recipe for kind in KINDS for recipe in read_recipes(device, kind)]
    return next(recipe for recipe in recipes if recipe.name == name)


def _check(row: Mapping[str, Any], what: str, known: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Raise ValueError for a missing key, an unknown key, or a value of the wrong kind."""
    for name in needed:
        if name not in row:
            raise ValueError(f"{what} has no {name}; add it")
    for name, value in row.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"correct it to {near[0]}" if near else "remove it"
            raise ValueError(f"{what} has the unknown key {quoted(name)}; {advice}")
        if name in CHECKS and not CHECKS[name][0](value):
            raise ValueError(f"{name} of {what} must be {CHECKS[name][1]}, got {quoted(value)}")


def _rate(
    values: Mapping[str, Any], recipes: Mapping[str, Recipe], tuned_rates: Mapping[str, float], what: str
) -> float:
    """Return the learning rate of a recipe, which may depend on an earlier recipe."""
    if "rate_of" in values:
        name = values["rate_of"]
        if name not in recipes:
            raise ValueError(
                f"rate_of of {what} is {name!r}, no earlier recipe of its kind; name an earlier one"
            )
        ratio = values["global_batch_size"] / recipes[name].global_batch_size
        return (
            recipes[name].rate * SCALES[values["scale"]](ratio) if "scale" in values else recipes[name].rate
        )
    if "rates" in values:
        return tuned_rates.get(values["name"], values["rates"][0])
    if "rate" not in values:
        raise ValueError(f"{what} has no learning rate; add rate, rates or rate_of")
    return float(values["rate"])


def _fields(values: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a RunSpec; another optimizer than SGD has none of SGD's options."""
    found = {name: value for name, value in values.items() if name in OF_RECIPE}
    if found.get("optimizer", "sgd") != "sgd":
        found = {name: value for name, value in found.items() if name in row or name not in SGD_ONLY}
    return found


def _require_trainable(recipe: Recipe, what: str) -> None:
    """Raise ValueError if a recipe contradicts itself, such as a warm-up longer than the training."""
    if recipe.images_at_once and recipe.fields["grow_from"]:
        raise ValueError(f"{what} has images_at_once and grow_from, which exclude each other; remove one")
    world_size = recipe.devices or 1
    model = recipe.model or recipe.data.get("model", RunSpec.model)
    try:
        for rate in (recipe.rate, *recipe.rates):
            RunSpec(
                model=model,
                strategy="single" if world_size == 1 else "ddp",
                input="device",
                epoch_images=recipe.global_batch_size,
                test_images=1,
                **recipe._work(world_size, rate),
            )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} cannot be trained: {error}") from error


def rate_id(recipe: Recipe, rate: float) -> str:
    """Return the test id of a training recipe at one learning rate: "2048-LARS-rate=10"."""
    return f"{recipe.id}-rate={rate:g}"


def of_recipe(recipe: Recipe, training: Case) -> ParameterSet:
    """Return a test case that trains with a recipe, whose name is stored."""
    found = pytest.param(training) if isinstance(training, Spec) else training
    return pytest.param(*found.values, id=found.id, marks=[*found.marks, pytest.mark.recipe(recipe.name)])


def tuning_seeds(device: str) -> int:
    """Return the number of random seeds for each learning rate that tuning tries."""
    return int(_document()[device]["tuning_seeds"])


def _document() -> dict[str, Any]:
    path = FOLDER / "recipes.toml"
    try:
        document: dict[str, Any] = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({first_line(error)}); correct it") from error
    devices, common = ("cpu", "cuda"), tuple(dict.fromkeys(KINDS.values()))
    _check(document, path.name, [*common, *devices])
    for name in (*common, *devices):
        what, table = f"[{name}] in {path.name}", document.get(name)
        if not isinstance(table, dict):
            raise ValueError(f"{path.name} has no table [{name}]; add it")
        if name in common:
            _check(table, what, [*OF_RECIPE, "rate", "seeds"])
            continue
        _check(table, what, [*OF_DEVICE, *KINDS], OF_DEVICE[len(OF_DATA) :])
        for kind in KINDS:
            rows = table.get(kind, [])
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"{kind} of {what} must be tables; write [[{name}.{kind}]] above a recipe")
    return document


def tuned() -> dict[str, Any]:
    """Return the tuning results in perf/recipes.json, or an empty dict if the file does not exist.

    The result of each device type and recipe has the best learning rate and the test accuracy of
    every learning rate that was tried.
    Raises ValueError for a damaged file.
    """
    path = FOLDER / "recipes.json"
    try:
        found: dict[str, Any] = json.loads(read_text(path)) if path.exists() else {}
        if all(_is_number(row["rate"]) for rows in found.values() for row in rows.values()):
            return found
        problem = "a rate is no number above 0"
    except (OSError, ValueError, RecursionError) as error:
        problem = first_line(error)
    except (AttributeError, KeyError, TypeError):
        problem = "a recipe has no rate"
    raise ValueError(f"{path.name} cannot be read ({problem}); restore it, or remove it to tune again")
