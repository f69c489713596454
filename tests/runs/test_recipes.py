"""The recipes of large batches: each can be trained, the best rate is kept, and seeds are averaged."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from ddpperf.results.metrics import find
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec, to_json
from ddpperf.training.whole_training import TrainingRun
from perf.common import recipes
from perf.common.recipes import find_recipe, rate_id, read_recipes, tuning_seeds
from perf.learning_rates import FIRST_SEED, grid
from perf.test_large_batch import accuracies_of_reports, largest_tuned, trainings
from tests.canned import CannedSuite
from tests.command_line import Read, specs_of
from tests.experiments import canned_counters, with_experiments
from tests.fake_measure import FakeMeasure
from tests.project import Project
from tools import update_recipes


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda", 4), ("cuda", 8)])
@pytest.mark.parametrize("kind", ["recipe", "remedy"])
def test_every_recipe_can_be_trained(read: Read, device: str, gpus: int, kind: str) -> None:
    options = read(gpus=gpus)
    specs = specs_of(trainings(options, kind=kind))
    count = len(read_recipes(device, kind))
    assert len(set(specs)) == len(specs) >= count - (2 if kind == "recipe" else 0)
    sizes = {16, 64} if device == "cpu" else {128, 2048, 8192} | ({512} if kind == "recipe" else set())
    assert {spec.global_batch_size for spec in specs} == sizes
    assert all(
        spec.world_size == (1 if spec.global_batch_size in (16, 128) else options.world_sizes[-1])
        for spec in specs
    )
    assert {spec.epoch_images for spec in specs} == ({256} if device == "cpu" else {50_000})


@pytest.mark.parametrize(("device", "small", "large"), [("cpu", 16, 64), ("cuda", 128, 2048)])
def test_each_remedy_changes_one_thing(device: str, small: int, large: int) -> None:
    plain = find_recipe(device, f"{large}, as it is")
    alone = [recipe for recipe in read_recipes(device, "remedy") if recipe.name.startswith(f"{large}, ")]
    assert len(alone) == 18
    for recipe in alone[1:]:
        changed = {name for name, value in recipe.fields.items() if value != plain.fields[name]}
        changed |= {"images_at_once"} if recipe.images_at_once == small else set()
        if "optimizer" in changed:  # these optimizers have their own rates, and none of SGD's options
            assert changed == {"optimizer", "nesterov", "decay_vectors"}
        else:
            assert len(changed) == (0 if "scaling" in recipe.name else 1), recipe.name
            scale = {"linear": large / small, "square-root": (large / small) ** 0.5}
            name = recipe.name.removeprefix(f"{large}, ").partition(" scaling")[0]
            assert recipe.rate == pytest.approx(0.1 * scale.get(name, 1))


def test_reports_are_trained_on_gpus_only(read: Read) -> None:
    assert specs_of(trainings(read(), kind="report")) == []
    specs = specs_of(trainings(read(gpus=4), kind="report"))
    batches = {spec.global_batch_size for spec in specs if spec.epochs == 5}
    assert batches == {32, 64, 128, 256, 512, 1024, 2048, 8192}
    assert {(spec.epochs, spec.world_size) for spec in specs} == {(5, 1), (10, 1), (50, 1)}
    named = specs_of(trainings(read("--model", "resnet18", gpus=1), kind="report"))
    assert "resnet50_cifar" in {spec.model for spec in named}


def test_accumulation_keeps_the_global_batch(read: Read) -> None:
    for gpus, parts in ((1, 16), (4, 4)):
        spec = find_recipe("cuda", "2048, accumulation").spec(read(gpus=gpus))
        assert (spec.global_batch_size, spec.accumulation_steps) == (2048, parts)


def test_recipe_that_does_not_fit_is_refused(read: Read) -> None:
    large, accumulated = largest_tuned("cpu"), find_recipe("cuda", "2048, accumulation")
    with pytest.raises(ValueError, match="batch 64 does not divide over 3 devices; use a divisor"):
        large.spec(read("--world-sizes", "1,3"))
    with pytest.raises(
        ValueError, match="batch of 32 images per rank is more than its 16 images of an epoch"
    ):
        large.spec(read("--epoch-images", "32"))
    with pytest.raises(ValueError, match="batch 64 per device does not divide into parts of 128 images"):
        dataclasses.replace(accumulated, global_batch_size=512).spec(read(gpus=8))
    data = dataclasses.replace(read().data, name="imagefolder", classes=100)
    with pytest.raises(ValueError, match="resnet10_cifar has 10 outputs, imagefolder has 100 classes"):
        large.spec(dataclasses.replace(read(), data=data))


def test_recipe_is_applied_to_another_ones_data(read: Read) -> None:
    small, large = read_recipes("cpu")[0], largest_tuned("cpu")
    options = read("--epoch-images", "128", "--model", "resnet18_cifar")
    assert large.spec(options).model == "resnet18_cifar"
    assert small.like(large.spec(options)) == small.spec(options)


def test_rates_start_from_the_small_batchs_tuned_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {
        "cpu": {"16, warm-up + linear decay": {"rate": 0.8}},
        "cuda": {"128, warm-up + linear decay": {"rate": 0.2}},
    }
    monkeypatch.setattr(recipes, "tuned", lambda: stored)
    rates = {each.name: each.rate for device in ("cpu", "cuda") for each in read_recipes(device)}
    assert rates["16, warm-up + linear decay"] == rates["64, warm-up + linear decay"] == 0.8
    assert rates["64, tuned rate + warm-up + linear decay"] == 0.1, "the first of its grid"
    assert rates["2048, warm-up + linear decay"] == 0.2
    assert rates["2048, linear scaling + warm-up + linear decay"] == pytest.approx(16 * 0.2)
    assert rates["2048, square-root scaling + warm-up + linear decay"] == pytest.approx(4 * 0.2)


def test_best_rate_of_the_grid_is_kept(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, *_ = read_recipes("cpu")
    reached = {0.05: 0.5, 0.1: 0.9, 0.2: 0.7}
    benchmarks: list[dict[str, Any]] = []
    for rate, accuracy in reached.items():
        metrics = {"test_accuracy": {"value": accuracy}}
        stored = {"spec": to_json(small.spec(read(), rate)), "metrics": metrics}
        benchmarks.append({"name": f"test_rates[{rate}]", "extra_info": {"ddpperf": stored}})
    failed = [rate_id(small, rate) for rate in set(small.rates) - reached.keys()]
    outcomes = {f"perf/learning_rates.py::test_rates[{name}]": {"kind": "failed"} for name in failed}
    header: dict[str, Any] = {"environment": {"backend": "gloo"}, "outcomes": outcomes}
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"ddpperf": header, "benchmarks": benchmarks}))
    monkeypatch.setattr(update_recipes, "FOLDER", tmp_path)
    monkeypatch.setattr(update_recipes, "tuned", lambda: {"cuda": {"kept": {}}, "cpu": {"another": {}}})
    update_recipes.main(str(run))
    tried = {f"{rate:g}": reached.get(rate, 0) for rate in sorted(small.rates)}
    best = {"rate": 0.1, "test_accuracy": 0.9, "seeds": 2, "grid": tried}
    kept = json.loads((tmp_path / "recipes.json").read_text())
    assert kept == {"cuda": {"kept": {}}, "cpu": {"another": {}, small.name: best}}
    run.write_text(json.dumps({"ddpperf": header, "benchmarks": benchmarks[:1]}))
    with pytest.raises(ValueError, match=r"without its rate 0\.\d; run all rates of a recipe"):
        update_recipes.main(str(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("16, warm-up + linear decay", 0.9),
        ("64, tuned rate + warm-up + linear decay", 0.5),
        ("64, growing batch + warm-up + linear decay", 0.7),
    ],
)
def test_cpu_recipes_learn(read: Read, name: str, least: float) -> None:
    """By the rates that are stored, on one rank; a tenth is chance."""
    recipe = find_recipe("cpu", name)
    run = TrainingRun(recipe.spec(read("--world-sizes", "1")), rank=0, device=torch.device("cpu"))
    run.warm_up(2)
    run.step()
    assert run.finish()["test_accuracy_4"] > least


def test_tuning_tries_every_rate_of_every_recipe(read: Read) -> None:
    """A long run is tuned in the fastest execution mode."""
    tried = specs_of(grid(read("--world-sizes", "1,2", gpus=2)))
    recipes_of = {kind: read_recipes("cuda", kind) for kind in ("recipe", "long")}
    assert len(tried) == sum(len(recipe.rates) for kind in recipes_of.values() for recipe in kind)
    assert {spec.rate for spec in tried if spec.epochs == 50} == set(recipes_of["long"][0].rates)
    assert {(spec.epochs, spec.execution) for spec in tried} == {(50, "compile+graph"), (5, "graph")}
    assert min(spec.seed for spec in tried) == FIRST_SEED


NAME = 'name = "{}, warm-up"\n'
BATCHES = "batch_sizes = { cpu = [64], cuda = [2048, 8192] }\n"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (NAME, f"{NAME}device = 1\n", "the key 'device' is unknown; correct or remove it"),
        (
            NAME,
            f'{NAME}rate_of = "64, warm-up"\n',
            "rate_of is '64, warm-up', but no earlier recipe of this kind has",
        ),
        (f"{NAME}{BATCHES}", NAME, "warm-up' of cpu in recipes.toml has no 'global_batch_size'; add it"),
        (NAME, "name = \n", "recipes.toml cannot be read (Invalid value"),
        (f"[[remedy]]\n{NAME}", f"[[remedies]]\n{NAME}", "the unknown table 'remedies'; correct or remove"),
    ],
)
def test_wrong_recipe_ends_the_run(canned_suite: CannedSuite, old: str, new: str, sentence: str) -> None:
    with_experiments(canned_suite)
    file = canned_suite.root / "perf" / "recipes.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "FOLDER", file.parent)
        run = canned_suite.run("perf/test_large_batch.py")
    run.assert_one_sentence(4, sentence)
    assert "Traceback" not in run.output


def test_stored_grid_belongs_to_these_recipes() -> None:
    assert "cpu" in recipes.tuned()
    for device, found in recipes.tuned().items():
        grids = {each.name: set(each.rates) for each in read_recipes(device) if each.rates}
        assert found.keys() == grids.keys()
        for name, row in found.items():
            assert {float(rate) for rate in row["grid"]} == grids[name]
            assert row["seeds"] == tuning_seeds(device)
            assert row["test_accuracy"] == max(row["grid"].values()) == row["grid"][f"{row['rate']:g}"]


@pytest.mark.parametrize("kind", ["canned_suite", pytest.param("project", marks=pytest.mark.slow)])
def test_large_batches_are_compared_with_the_small_one(kind: str, request: pytest.FixtureRequest) -> None:
    """The stored accuracies are means over seeds, and differences to the references' means."""
    project: Project = request.getfixturevalue(kind)
    with_experiments(project)
    if isinstance(project, CannedSuite):
        project.canned.counters = canned_counters
    run = project.run("perf/test_large_batch.py", "--world-sizes", "1,2", "--epoch-images", "64")
    trained = [str(dataclasses.replace(each, name="", rates=())) for each in read_recipes("cpu")]
    alike = len(trained) - len(set(trained))  # a rate may be another's best
    measured = len(trained) - alike + len(read_recipes("cpu", "remedy")) + 1
    skipped = alike + len(read_recipes("cuda", "report")) + 1
    run.assert_one_sentence(0, f"PASS: {measured} tests measured, {skipped} skipped")
    for name, stored in project.measured().items():
        assert_compared(name, stored)


def accuracy(part: dict[str, Any]) -> float:
    return float(part["samples"][0]["counters"]["test_accuracy_4"][0])


def assert_compared(name: str, stored: dict[str, Any]) -> None:
    values = {metric: each["value"] for metric, each in stored["metrics"].items()}
    references, spec, is_remedy = stored["references"], stored["spec"], name.startswith("test_remedies")
    seeds = (0,) if is_remedy else (0, 1)  # one seed has no interval
    own = mean([accuracy(stored), *(accuracy(references[f"seed={seed}"]) for seed in seeds[1:])])
    assert values["test_accuracy"] == pytest.approx(own)
    assert ("test_accuracy_low" in values) == (not is_remedy)
    batches = {"baseline": 16, "as_it_is": 64, "one_device": 64}
    for reference in {each.partition(",")[0] for each in references if "," in each}:
        of_seeds = [references[f"{reference}, seed={seed}"] for seed in seeds]
        other, others = of_seeds[0]["spec"], mean(map(accuracy, of_seeds))
        if reference in batches:
            assert values[f"accuracy_over_{reference}"] == pytest.approx(own - others)
            assert other["world_size"] * other["per_rank_batch_size"] == batches[reference]
        else:
            assert values[f"accuracy_{reference}"] == pytest.approx(others - own)
        if is_remedy:
            plain = [other[field] for field in ("nesterov", "decay_vectors", "schedule")]
            assert plain == [False, True, "constant"]
            assert other.get("accumulation_steps", 1) == 1
    compared = {metric for metric in values if re.fullmatch("accuracy_(?!.*(low|high)).*", metric)}
    small = spec["world_size"] == 1
    if "same_result" in name:
        assert len(compared) == 3
        assert references["unscaled_rate, seed=0"]["spec"]["rate"] == spec["rate"] / 2
        assert references["without_set_epoch, seed=0"]["spec"]["set_epoch"] is False
    else:
        assert len(compared) == (0 if small else 2 if is_remedy and "as-it-is" not in name else 1)
    if not is_remedy:
        seconds = mean(
            sum(max(part["samples"][0]["counters"][f"train_seconds_{epoch}"]) for epoch in range(1, 5))
            for part in (stored, references["seed=1"])
        )
        assert values["images_per_second"] == pytest.approx(4 * 64 / seconds)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("8192, as it is", {"reported_train_accuracy_A": 0.739, "reported_train_loss_A": 0.742}),
        ("ResNet-18, 50 epochs", {"reported_best_test_accuracy_C": 0.8755}),
    ],
)
def test_accuracies_of_reports_are_stored(read: Read, name: str, metrics: dict[str, float]) -> None:
    recipe, measure = find_recipe("cuda", name), FakeMeasure()
    sample = Sample(set="A1", side="A", torch="2.11", seconds=((1.0,),))
    synthetic = Measured(spec=recipe.spec(read(gpus=1)), iterations=1, samples=(sample,))
    accuracies_of_reports(measure, recipe, [synthetic])  # type: ignore[arg-type]
    assert measure.metrics == {}, "synthetic images are not those of the reports"
    assert isinstance(synthetic.spec, RunSpec)
    real = dataclasses.replace(synthetic.spec, data="imagefolder", digest="0" * 12)
    accuracies_of_reports(measure, recipe, [dataclasses.replace(synthetic, spec=real)])  # type: ignore[arg-type]
    assert measure.metrics == {metric: {"A1": value} for metric, value in metrics.items()}
    assert {find(metric).unit for metric in metrics} == {"1"}
