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
import torch._dynamo  # before pytester: importing its libraries twice ends the process
from _pytest.mark import ParameterSet

from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.read import read_options
from ddpperf.specs import RunSpec, to_json
from ddpperf.training.run import TrainingRun
from perf.common import recipes
from perf.common.recipes import read_recipes, seeds_of
from perf.test_large_batch import largest_tuned
from perf.test_large_batch import recipes as cases
from perf.tuning import FIRST_SEED, grid
from tests.canned import CannedSuite
from tests.experiments import canned_counters, with_experiments
from tests.project import REPOSITORY, Finished, Project, script

pytest_plugins = ["pytester"]


@pytest.fixture
def options(pytester: pytest.Pytester) -> Any:
    def read(*arguments: str, gpus: int = 0) -> Options:
        return read_options(pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus)

    return read


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda", 4), ("cuda", 8)])
def test_every_recipe_can_be_trained(options: Any, device: str, gpus: int) -> None:
    read = options(gpus=gpus)
    specs = [spec for spec in cases(read) if isinstance(spec, RunSpec)]
    assert len({spec.id for spec in specs}) == len(specs) >= len(read_recipes(device)) - 2
    assert {spec.global_batch_size for spec in specs} == (
        {16, 64} if device == "cpu" else {128, 512, 2048, 8192}
    )
    assert all(
        spec.world_size == (1 if spec.global_batch_size in (16, 128) else read.world_sizes[-1])
        for spec in specs
    )
    assert {spec.epoch_images for spec in specs} == ({256} if device == "cpu" else {50_000})


def test_batch_that_does_not_fit_is_refused(options: Any) -> None:
    large = largest_tuned("cpu")
    with pytest.raises(ValueError, match="batch 64 does not divide over 3 devices; use a divisor"):
        large.spec(options("--world-sizes", "1,3"))
    with pytest.raises(
        ValueError,
        match="a batch of 32 images per rank is more than its 16 of the data set; use a smaller one",
    ):
        large.spec(options("--epoch-images", "32"))


def test_model_option_is_trained(options: Any) -> None:
    assert largest_tuned("cpu").spec(options()).model == "resnet10_cifar"
    assert largest_tuned("cpu").spec(options("--model", "resnet18_cifar")).model == "resnet18_cifar"


def test_large_batch_as_it_is_has_the_small_batchs_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "tuned", lambda: {"cpu": {"small batch": {"rate": 0.8}}})
    rates = {each.name: each.rate for each in read_recipes("cpu")}
    assert rates["small batch"] == rates["large batch as it is"] == 0.8
    assert rates["large batch, its own rate"] == 0.1, "the first of its grid, where none was tuned"


def test_scaled_rates_start_from_the_small_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "tuned", lambda: {"cuda": {"small batch, SGD": {"rate": 0.2}}})
    rates = {each.name: each.rate for each in read_recipes("cuda")}
    assert rates["2048 as it is"] == 0.2
    assert rates["2048, rate scaled linearly"] == pytest.approx(16 * 0.2)
    assert rates["2048, rate scaled by the square root"] == pytest.approx(4 * 0.2)


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
    small = next(each for each in read_recipes("cpu") if each.name == "small batch")
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
    *others, diverged = sorted(set(small.rates) - reached.keys())
    outcomes = {
        f"perf/tuning.py::test_rates[small batch, rate={rate:g}]": {"kind": "failed"}
        for rate in (*others, diverged)
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
            "small batch": {
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
    with pytest.raises(
        ValueError, match=r"the run has 'small batch' without its rate 0\.1; run all rates of a recipe"
    ):
        update.main(str(run))
    del benchmarks[0]  # 0.05: then 0.2 is the best, and the one that is left
    outcomes |= {
        f"perf/tuning.py::test_rates[small batch, rate={rate:g}]": {"kind": "failed"} for rate in (0.05, 0.1)
    }
    run.write_text(json.dumps({"ddpperf": header, "benchmarks": benchmarks}))
    update.main(str(run))
    assert json.loads((tmp_path / "recipes.json").read_text())["cpu"]["small batch"]["rate"] == 0.2
    run.write_text(
        json.dumps({"ddpperf": {"environment": {"backend": "nccl"}, "outcomes": {}}, "benchmarks": []})
    )
    with pytest.raises(
        ValueError, match=r"the run holds no recipe of cuda; make one by pytest perf/tuning\.py"
    ):
        update.main(str(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("small batch", 0.9), ("large batch, its own rate", 0.5), ("growing batch", 0.7)]
)
def test_cpu_recipes_learn(options: Any, name: str, least: float) -> None:
    """By the rates that are stored, on one rank; a tenth is chance."""
    (recipe,) = [each for each in read_recipes("cpu") if each.name == name]
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


def test_unknown_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "perf" / "recipes.toml").read_text()
    (tmp_path / "recipes.toml").write_text(text.replace("\ndevices = 1", "\ndevice = 1", 1))
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    with pytest.raises(
        ValueError,
        match=r"recipe 'small batch' of cpu has the unknown key 'device'; correct it in recipes\.toml",
    ):
        read_recipes("cpu")


def test_stored_grid_belongs_to_these_recipes() -> None:
    assert "cpu" in recipes.tuned()
    for device, found in recipes.tuned().items():
        grids = {each.name: set(each.rates) for each in read_recipes(device) if each.rates}
        assert found.keys() == grids.keys()
        for name, row in found.items():
            assert {float(rate) for rate in row["grid"]} == grids[name]
            assert row["seeds"] == seeds_of(device, "tuning_seeds")
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


@pytest.mark.slow
def test_training_resumes_from_its_checkpoint(project: Project) -> None:
    project.experiment.write_text(LARGE.replace("RATE", "0.1"))
    arguments = ("perf", "--world-sizes", "1", "--checkpoints", "kept")
    first = project.run(*arguments)
    first.assert_one_sentence(0, "test_it", "accuracy", "images/s")
    first.assert_one_sentence(0, "PASS: 1 test measured")
    assert "spread is unknown" not in first.output
    (kept,) = (project.root / "kept").iterdir()
    again = project.run(*arguments)
    again.assert_one_sentence(0, "the training was resumed from a checkpoint")
    kept.write_bytes(kept.read_bytes()[:1000])
    cut = project.run(*arguments)
    assert cut.status == 1
    assert "cannot be read" in cut.output
    assert "remove it to start again" in cut.output
    assert "Traceback" not in cut.output


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
    run.assert_one_sentence(0, f"PASS: {len(trained) - alike + 1} tests measured, {alike + 1} skipped")
    run.assert_one_sentence(0, "by epoch: train loss", "test accuracy")

    def accuracies(part: dict[str, Any]) -> float:
        return float(part["samples"][0]["counters"]["test_accuracy_4"][0])

    for name, stored in project.measured().items():
        references = stored["references"]
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
