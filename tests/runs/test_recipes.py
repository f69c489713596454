"""The recipes of large batches: each can be trained, the best rate is kept, and seeds are averaged."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import torch._dynamo  # before pytester: importing its libraries twice ends the process
from _pytest.mark import ParameterSet

from ddpperf.plugin.options.options import Options, read_options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec, to_json
from ddpperf.training.whole_training import TrainingRun
from perf.common import recipes
from perf.common.recipes import KINDS, find_recipe, rate_id, read_recipes, require_outputs, tuning_seeds
from perf.learning_rates import FIRST_SEED, grid
from perf.test_large_batch import compare_with_reports, largest_tuned, remedies, reports
from perf.test_large_batch import recipes as together
from tests.canned import CannedSuite
from tests.experiments import canned_counters, with_experiments
from tests.fake_measure import FakeMeasure
from tests.project import REPOSITORY, Finished, Project, script

pytest_plugins = ["pytester"]


@pytest.fixture
def options(pytester: pytest.Pytester) -> Any:
    def read(*arguments: str, gpus: int = 0) -> Options:
        return read_options(pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus)

    return read


def specs_of(make: Any, read: Options) -> list[RunSpec]:
    """Return the training specs of all cases that are not skipped."""
    values = [case.values[0] for case in make(read)]
    return [spec for spec in values if isinstance(spec, RunSpec)]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda", 4), ("cuda", 8)])
@pytest.mark.parametrize(("make", "kind"), [(together, "recipe"), (remedies, "remedy")])
def test_every_recipe_can_be_trained(options: Any, device: str, gpus: int, make: Any, kind: str) -> None:
    read = options(gpus=gpus)
    specs = specs_of(make, read)
    count = len(read_recipes(device, kind))
    assert len(set(specs)) == len(specs) >= count - (2 if kind == "recipe" else 0)
    sizes = {16, 64} if device == "cpu" else {128, 2048, 8192} | ({512} if kind == "recipe" else set())
    assert {spec.global_batch_size for spec in specs} == sizes
    assert all(
        spec.world_size == (1 if spec.global_batch_size in (16, 128) else read.world_sizes[-1])
        for spec in specs
    )
    assert {spec.epoch_images for spec in specs} == ({256} if device == "cpu" else {50_000})


def test_names_of_recipes_are_unique() -> None:
    for device in ("cpu", "cuda"):
        names = [recipe.name for kind in KINDS for recipe in read_recipes(device, kind)]
        assert len(set(names)) == len(names)
        assert all(find_recipe(device, name).name == name for name in names)


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


def test_reports_are_trained_on_gpus_only(options: Any) -> None:
    skipped = list(reports(options()))
    reasons = {mark.kwargs["reason"] for case in skipped for mark in case.marks if mark.name == "skip"}
    assert reasons == {"whole trainings of ResNets take hours on a CPU; run them on GPUs"}
    specs = specs_of(reports, options(gpus=4))
    batches = {spec.global_batch_size for spec in specs if spec.epochs == 5}
    assert batches == {32, 64, 128, 256, 512, 1024, 2048}
    assert {(spec.epochs, spec.world_size) for spec in specs} == {(5, 1), (10, 1), (50, 1)}
    assert "resnet50_cifar" in {
        spec.model for spec in specs_of(reports, options("--model", "resnet18", gpus=1))
    }


def test_accumulation_keeps_the_global_batch(options: Any) -> None:
    for gpus, parts in ((1, 16), (4, 4)):
        spec = find_recipe("cuda", "2048, accumulation").spec(options(gpus=gpus))
        assert (spec.global_batch_size, spec.accumulation_steps) == (2048, parts)
    with pytest.raises(ValueError, match="batch 64 per device does not divide into parts of 128 images"):
        dataclasses.replace(find_recipe("cuda", "2048, accumulation"), global_batch_size=512).spec(
            options(gpus=8)
        )


def test_too_many_classes_are_refused(options: Any) -> None:
    data = dataclasses.replace(options().data, name="imagefolder", classes=100)
    sentence = "the recipe's model resnet10_cifar has 10 outputs, imagefolder has 100 classes; use another"
    with pytest.raises(ValueError, match=sentence):
        find_recipe("cpu", "64, as it is").spec(dataclasses.replace(options(), images=data))
    require_outputs("resnet18", data)


def test_batch_that_does_not_fit_is_refused(options: Any) -> None:
    large = largest_tuned("cpu")
    with pytest.raises(ValueError, match="batch 64 does not divide over 3 devices; use a divisor"):
        large.spec(options("--world-sizes", "1,3"))
    with pytest.raises(
        ValueError,
        match="a batch of 32 images per rank is more than its 16 images of an epoch; use a smaller one",
    ):
        large.spec(options("--epoch-images", "32"))


def test_model_option_is_trained(options: Any) -> None:
    assert largest_tuned("cpu").spec(options()).model == "resnet10_cifar"
    assert largest_tuned("cpu").spec(options("--model", "resnet18_cifar")).model == "resnet18_cifar"


def test_rate_of_another_recipe_is_its_tuned_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "tuned", lambda: {"cpu": {"16, warm-up + linear decay": {"rate": 0.8}}})
    rates = {each.name: each.rate for each in read_recipes("cpu")}
    assert rates["16, warm-up + linear decay"] == rates["64, warm-up + linear decay"] == 0.8
    assert rates["64, tuned rate + warm-up + linear decay"] == 0.1, "the first of its grid"


def test_scaled_rates_start_from_the_small_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "tuned", lambda: {"cuda": {"128, warm-up + linear decay": {"rate": 0.2}}})
    rates = {each.name: each.rate for each in read_recipes("cuda")}
    assert rates["2048, warm-up + linear decay"] == 0.2
    assert rates["2048, linear scaling + warm-up + linear decay"] == pytest.approx(16 * 0.2)
    assert rates["2048, square-root scaling + warm-up + linear decay"] == pytest.approx(4 * 0.2)


def test_recipe_is_applied_to_another_ones_data(options: Any) -> None:
    small, large = read_recipes("cpu")[0], largest_tuned("cpu")
    read = options("--epoch-images", "128")
    assert small.like(large.spec(read)) == small.spec(read)
    assert large.like(large.spec(read)) == large.spec(read)
    assert dataclasses.replace(large, devices=1).like(large.spec(read)).per_rank_batch_size == 64


def test_best_rate_of_the_grid_is_kept(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = script("update_recipes")
    small, *_ = read_recipes("cpu")
    reached = {0.05: 0.5, 0.1: 0.9, 0.2: 0.7}
    benchmarks = [
        {
            "name": f"test_rates[{spec.id}]",
            "extra_info": {
                "ddpperf": {
                    "spec": to_json(spec),
                    "metrics": {"test_accuracy": {"value": reached[spec.rate]}},
                }
            },
        }
        for spec in (small.spec(options(), rate) for rate in reached)
    ]
    outcomes = {
        f"perf/learning_rates.py::test_rates[{rate_id(small, rate)}]": {"kind": "failed"}
        for rate in set(small.rates) - reached.keys()
    }
    run = tmp_path / "run.json"
    header: dict[str, Any] = {"environment": {"backend": "gloo"}, "outcomes": outcomes}
    run.write_text(json.dumps({"ddpperf": header, "benchmarks": benchmarks}))
    monkeypatch.setattr(update, "FOLDER", tmp_path)
    monkeypatch.setattr(update, "tuned", lambda: {"cuda": {"kept": {}}, "cpu": {"another": {}}})
    update.main(str(run))
    found = json.loads((tmp_path / "recipes.json").read_text())
    assert found == {
        "cuda": {"kept": {}},
        "cpu": {
            "another": {},
            small.name: {
                "rate": 0.1,
                "test_accuracy": 0.9,
                "seeds": 2,
                "grid": {f"{rate:g}": reached.get(rate, 0) for rate in sorted(small.rates)},
            },
        },
    }
    assert capsys.readouterr().out == "", "the best rate has others on both sides"
    benchmarks[1]["name"] = "test_large_batch[it is no try]"
    run.write_text(json.dumps({"ddpperf": header, "benchmarks": benchmarks}))
    missing = r"the run has '16, warm-up \+ linear decay' without its rate 0\.1; run all rates of a recipe"
    with pytest.raises(ValueError, match=missing):
        update.main(str(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("16, warm-up + linear decay", 0.9),
        ("64, tuned rate + warm-up + linear decay", 0.5),
        ("64, growing batch + warm-up + linear decay", 0.7),
    ],
)
def test_cpu_recipes_learn(options: Any, name: str, least: float) -> None:
    """By the rates that are stored, on one rank; a tenth is chance."""
    recipe = find_recipe("cpu", name)
    run = TrainingRun(recipe.spec(options("--world-sizes", "1")), rank=0, device=torch.device("cpu"))
    run.warm_up(2)
    run.step()
    assert run.finish()["test_accuracy_4"] > least


def test_tuning_tries_every_rate_of_every_recipe(options: Any) -> None:
    """A long run in the fastest one."""
    read = options("--world-sizes", "1,2", gpus=2)
    tried = [case.values[0] if isinstance(case, ParameterSet) else case for case in grid(read)]
    recipes_of = {kind: read_recipes("cuda", kind) for kind in ("recipe", "long")}
    assert len(tried) == sum(len(recipe.rates) for kind in recipes_of.values() for recipe in kind)
    long = [spec for spec in tried if isinstance(spec, RunSpec) and spec.epochs == 50]
    assert {spec.rate for spec in long} == set(recipes_of["long"][0].rates)
    assert {spec.execution for spec in long} == {"compile+graph"}
    assert {spec.execution for spec in tried if isinstance(spec, RunSpec) and spec.epochs == 5} == {"graph"}
    assert min(spec.seed for spec in tried if isinstance(spec, RunSpec)) == FIRST_SEED


NAME = 'name = "{}, warm-up"\n'
BATCHES = "batch_sizes = { cpu = [64], cuda = [2048, 8192] }\n"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (NAME, f"{NAME}device = 1\n", "has the unknown key 'device'; correct it to devices"),
        (NAME, f"{NAME}clip_norm = -1.0\n", "clip_norm must be a number from 0 to 1e+06, got -1.0"),
        (NAME, f'{NAME}rate = "fast"\n', "cannot be trained: could not convert string to float: 'fast'"),
        (NAME, f'{NAME}rate_of = "64, warm-up"\n', "no earlier recipe of its kind; name an earlier one"),
        (NAME, f"{NAME}grow_from = 8\nimages_at_once = 8\n", "exclude each other; remove one"),
        (f"{NAME}{BATCHES}warmup_epochs = 1", f"{NAME}{BATCHES}warmup_epochs = 9",
         "warmup_epochs=9 is more than the 4 epochs of the run; use less"),
        (f"{NAME}{BATCHES}", NAME, "warm-up' of cpu in recipes.toml has no 'global_batch_size'; add it"),
        (NAME, "name = \n", "recipes.toml cannot be read (Invalid value"),
        (NAME, f"{NAME}devices = 3\n", "batch 64 does not divide over 3 devices; use a divisor"),
        (NAME, f"{NAME}rates = [0.1, 1e9]\n", "rate must be a number from 0 to 1000, got 1000000000.0"),
        ("[plain]\n", "[plane]\n", "recipes.toml has the unknown key 'plane'; correct it to plain"),
        (f"[[remedy]]\n{NAME}", f"[[remedies]]\n{NAME}", "correct it to remedy"),
    ],
)  # fmt: skip
def test_wrong_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, sentence: str
) -> None:
    text = (REPOSITORY / "perf" / "recipes.toml").read_text()
    assert old in text
    (tmp_path / "recipes.toml").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        read_recipes("cpu", "remedy")
    assert "\n" not in str(refused.value)


def test_damaged_tuning_results_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes.toml").write_text((REPOSITORY / "perf" / "recipes.toml").read_text())
    (tmp_path / "recipes.json").write_text("{")
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"recipes\.json cannot be read \(Expecting property name"):
        read_recipes("cpu")


def test_wrong_recipes_file_ends_the_run(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    with_experiments(canned_suite)
    monkeypatch.setattr(recipes, "FOLDER", canned_suite.root / "perf")
    file = canned_suite.root / "perf" / "recipes.toml"
    file.write_text(file.read_text().replace(NAME, f"{NAME}clip_norm = -1.0\n"))
    run = canned_suite.run("perf/test_large_batch.py")
    run.assert_one_sentence(4, "recipe '64, warm-up' of cpu in recipes.toml cannot be trained: clip_norm")
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


LARGE = """
import pytest
from ddpperf.specs import RunSpec
from perf.test_large_batch import learned

def test_it(measure):
    spec = RunSpec(world_size=1, per_rank_batch_size=16, strategy="single", input="device", epoch_images=64,
                   test_images=32, epochs=2, rate=RATE, model="resnet10_cifar")
    learned(measure, [measure(spec)])
"""


def test_nan_loss_fails_with_its_epoch(project: Project) -> None:
    project.experiment.write_text(LARGE.replace("RATE", "1000"))
    run = project.run("perf", "--world-sizes", "1")
    assert run.status == 1
    assert re.search(r"the loss (on the test images )?is \S+ (in|after) epoch 1", run.output), run
    assert "use a smaller learning rate" in run.output
    assert "Traceback" not in run.output


OPTIONS = ("perf/test_large_batch.py", "--world-sizes", "1,2", "--epoch-images", "64")


def test_large_batches_are_compared_with_the_small_one(canned_suite: CannedSuite) -> None:
    with_experiments(canned_suite)
    canned_suite.canned.counters = canned_counters
    assert_compared(canned_suite, canned_suite.run(*OPTIONS))


@pytest.mark.slow
def test_large_batches_are_compared_on_real_ranks(project: Project) -> None:
    with_experiments(project)
    assert_compared(project, project.run(*OPTIONS))


def assert_compared(project: Project, run: Finished) -> None:
    """The stored accuracies are means over seeds, and differences to the references' means."""
    trained = [str(dataclasses.replace(each, name="", rates=())) for each in read_recipes("cpu")]
    alike = len(trained) - len(set(trained))  # a rate may be another's best
    measured = len(trained) - alike + len(read_recipes("cpu", "remedy")) + 1
    skipped = alike + len(read_recipes("cuda", "report")) + 1
    run.assert_one_sentence(0, f"PASS: {measured} tests measured, {skipped} skipped")
    run.assert_one_sentence(0, "by epoch: train loss", "test accuracy")

    def accuracies(part: dict[str, Any]) -> float:
        return float(part["samples"][0]["counters"]["test_accuracy_4"][0])

    for name, stored in project.measured().items():
        references = stored["references"]
        if name.startswith("test_remedies"):
            assert_remedy(name, stored, accuracies)
            continue
        own = mean([accuracies(stored), accuracies(references["seed=1"])])
        values = {metric: each["value"] for metric, each in stored["metrics"].items()}
        assert values["test_accuracy"] == pytest.approx(own)
        assert values["test_accuracy_low"] <= own <= values["test_accuracy_high"]
        small = stored["spec"]["world_size"] == 1
        if "same_result" in name:
            one = mean(accuracies(references[f"one_device, seed={seed}"]) for seed in (0, 1))
            assert values["accuracy_over_one_device"] == pytest.approx(own - one)
            assert references["one_device, seed=0"]["spec"]["per_rank_batch_size"] == 64
            for changed in ("without_set_epoch", "unscaled_rate"):
                other = mean(accuracies(references[f"{changed}, seed={seed}"]) for seed in (0, 1))
                assert values[f"accuracy_{changed}"] == pytest.approx(other - own)
            assert references["unscaled_rate, seed=0"]["spec"]["rate"] == stored["spec"]["rate"] / 2
            assert references["without_set_epoch, seed=0"]["spec"]["set_epoch"] is False
        elif not small:
            baseline = mean(accuracies(references[f"baseline, seed={seed}"]) for seed in (0, 1))
            assert values["accuracy_over_baseline"] == pytest.approx(own - baseline)
            assert references["baseline, seed=0"]["spec"]["world_size"] == 1
        seconds = mean(
            sum(max(part["samples"][0]["counters"][f"train_seconds_{epoch}"]) for epoch in range(1, 5))
            for part in (stored, references["seed=1"])
        )
        assert values["images_per_second"] == pytest.approx(4 * 64 / seconds)


def assert_remedy(name: str, stored: dict[str, Any], accuracies: Callable[[dict[str, Any]], float]) -> None:
    """A remedy is compared with the small batch, and with the same batch as it is."""
    values = {metric: each["value"] for metric, each in stored["metrics"].items()}
    assert values["test_accuracy"] == pytest.approx(accuracies(stored))
    assert "test_accuracy_low" not in values, "one seed has no interval"
    references = stored["references"]
    batches = {"accuracy_over_baseline": ("baseline", 16), "accuracy_over_as_it_is": ("as_it_is", 64)}
    for metric, (reference, batch) in batches.items():
        if name == "test_remedies[16-as-it-is]" or (batch == 64 and "as-it-is" in name):
            assert metric not in values
            continue
        other = references[f"{reference}, seed=0"]
        spec = other["spec"]
        assert values[metric] == pytest.approx(accuracies(stored) - accuracies(other))
        assert spec["world_size"] * spec["per_rank_batch_size"] == batch
        plain = (spec["nesterov"], spec["decay_vectors"], spec["schedule"], spec.get("accumulation_steps", 1))
        assert plain == (False, True, "constant", 1)


@pytest.mark.parametrize(
    ("name", "metrics", "note"),
    [
        (
            "128, as it is",
            {"reported_train_accuracy_A": 0.849, "reported_train_accuracy_B": 0.8222},
            "train accuracy after 5 epochs: 80.00% here, 84.90% in report A and 82.22% in report B",
        ),
        (
            "ResNet-18, 50 epochs",
            {"reported_test_accuracy_C": 0.8755},
            "test accuracy after 50 epochs: 60.00% here, 87.55% in report C",
        ),
    ],
)
def test_reports_are_compared_by_the_same_accuracy(
    options: Any, name: str, metrics: dict[str, float], note: str
) -> None:
    recipe, measure = find_recipe("cuda", name), FakeMeasure()
    spec = recipe.spec(options(gpus=1))
    accuracies = {"train_accuracy": 0.8, "test_accuracy": 0.6}
    counters: dict[str, tuple[float, ...]] = {
        f"{figure}_{epoch}": (value,) for figure, value in accuracies.items() for epoch in range(1, 51)
    }
    sample = Sample(set="A1", side="A", torch="2.11", seconds=((1.0,),), counters=counters)
    synthetic = Measured(spec=spec, iterations=1, samples=(sample,))
    compare_with_reports(measure, recipe, [synthetic])  # type: ignore[arg-type]
    assert measure.metrics == {}, "synthetic images are not those of the reports"
    real = dataclasses.replace(spec, data="imagefolder", digest="0" * 12)
    measured = dataclasses.replace(synthetic, spec=real)
    compare_with_reports(measure, recipe, [measured])  # type: ignore[arg-type]
    assert measure.metrics == {metric: {"A1": value} for metric, value in metrics.items()}
    assert measure.notes == [f"{name}: {note}"]


def test_losses_of_reports_are_those_of_both_batches() -> None:
    small = find_recipe("cuda", "128, as it is")
    for name, report, lost in (("8192, as it is", "A", 0.11), ("2048, as it is", "B", 0.1885)):
        ((metric, of_report, value),) = find_recipe("cuda", name).reported_losses(small)
        assert (metric, of_report, round(value, 6)) == ("train_accuracy", report, lost)
    assert find_recipe("cuda", "ResNet-18, 50 epochs").reported_losses(small) == []
