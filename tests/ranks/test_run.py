"""Whole trainings: what they learn and report, and what stops them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpperf.data.augmentation import DeviceImages
from ddpperf.data.images import load_images, normalized, synthetic_images
from ddpperf.data.inputs import DeviceInput
from ddpperf.data.sampler import EpochBatches
from ddpperf.machine.compiler import compiler_reason
from ddpperf.measuring.compile_and_capture import forget_compiled
from ddpperf.specs import RunSpec
from ddpperf.training import whole_training
from ddpperf.training.evaluation import Evaluation
from ddpperf.training.models import build
from ddpperf.training.schedules import rates_of
from ddpperf.training.whole_training import TrainingRun
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from perf.common.recipes import find_recipe

CPU = torch.device("cpu")
SMALL = RunSpec(
    model="resnet10_cifar",
    world_size=1,
    per_rank_batch_size=16,
    strategy="single",
    input="device",
    epoch_images=64,
    test_images=40,
    epochs=2,
    rate=0.02,
)
without_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision"
)
DROPS = pytest.param({"model": "torchvision:squeezenet1_1"}, marks=without_torchvision)  # it has dropout


def run_of(**fields: Any) -> TrainingRun:
    run = TrainingRun(dataclasses.replace(SMALL, **fields), rank=0, device=CPU)
    run.warm_up(2)
    return run


def parameters_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.training.module.state_dict().items()}


TIMES = ("train_seconds", "epoch_seconds")


def learned(run: TrainingRun) -> list[dict[str, float]]:
    """Return a run's history without times."""
    return [{name: value for name, value in each.items() if name not in TIMES} for each in run.history]


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd"},
        {"optimizer": "lars"},
        {"optimizer": "lamb"},
        {"precision": "fp16"},
        pytest.param({"optimizer": "muon"}, marks=pytest.mark.slow),
        pytest.param(*DROPS.values, marks=[*DROPS.marks, pytest.mark.slow]),
    ],
)
def test_a_run_depends_on_its_seed_only(fields: dict[str, Any]) -> None:
    """The warm-up and an earlier round train, too, and must leave nothing behind."""
    once, twice = run_of(**fields), run_of(**fields)
    twice.step()
    for each in (once, twice):
        each.step()
    ours, theirs = parameters_of(once), parameters_of(twice)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert learned(once) == learned(twice)
    other = run_of(**fields, seed=1)
    other.step()
    assert learned(other) != learned(once)


def test_training_ends_when_the_device_is_done_and_before_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = run_of(epochs=1), [0.0]

    def takes(seconds: float, result: Any) -> Any:
        now[0] += seconds
        return result

    monkeypatch.setattr(whole_training, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(whole_training, "synchronize", lambda device: takes(1, None))
    monkeypatch.setattr(run, "evaluation", lambda *_: takes(10, (0.5, 0.5)))
    run.step()
    assert [run.history[0][name] for name in TIMES] == [1, 11]


def test_a_nan_loss_stops_the_run() -> None:
    run = run_of(epochs=3)
    step = iter(range(100))

    def spoil(_: float) -> None:
        if next(step) == 5:  # the second of the second epoch
            with torch.no_grad():
                next(run.training.module.parameters()).fill_(math.nan)

    run.after_step = spoil
    with pytest.raises(
        FloatingPointError,
        match=r"the loss is nan in epoch 2, step 3 of 4; use a smaller learning rate, or a warm-up",
    ):
        run.step()


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")
def test_a_compiled_run_learns_like_an_eager_one() -> None:
    """The compiled part also counts right images and computes the loss without smoothing."""
    eager, compiled = (run_of(label_smoothing=0.1, execution=execution) for execution in ("eager", "compile"))
    for each in (eager, compiled):
        each.step()
    for ours, theirs in zip(learned(compiled), learned(eager), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    forget_compiled()


def test_a_growing_batch_doubles_each_epoch() -> None:
    run = run_of(epochs=4, grow_from=4)
    sizes: list[int] = []

    run.training.model.register_forward_pre_hook(
        lambda module, inputs: sizes.append(len(inputs[0])) if module.training else None
    )
    run.step()
    assert sizes == [4] * 16 + [8] * 8 + [16] * 4 + [16] * 4
    assert run.spec.batch_sizes == (4, 8, 16, 16)
    assert sum(run.spec.epoch_steps) == 32


def test_the_rate_follows_the_schedule_over_all_epochs() -> None:
    run = run_of(epochs=3, warmup_epochs=1, schedule="cosine", rate=0.01)
    rates: list[float] = []
    run.after_step = lambda _: rates.append(float(run.training.optimizer.param_groups[0]["lr"]))
    run.step()
    assert rates == pytest.approx(rates_of(run.spec))
    assert len(rates) == 12
    assert rates[4] == 0.01
    assert rates[0] < rates[3] < rates[4] > rates[11] > 0


@pytest.mark.slow
def test_overflowing_steps_are_counted_and_skipped() -> None:
    run = TrainingRun(dataclasses.replace(SMALL, precision="fp16", epochs=3), rank=0, device=CPU)
    run.start_scaler["scale"] = 2.0**22  # so large that several steps overflow
    run.training.scaler.load_state_dict(run.start_scaler)
    run.warm_up(2)
    changed: list[bool] = []
    before = next(run.training.model.parameters()).clone()

    def compare(_: float) -> None:
        nonlocal before
        now = next(run.training.model.parameters()).clone()
        changed.append(not torch.equal(now, before))
        before = now

    run.after_step = compare
    run.step()
    counters = run.finish()
    skipped = [counters[f"skipped_steps_{epoch}"] for epoch in (1, 2, 3)]
    assert 0 < sum(skipped) < 12
    assert skipped == [changed[first : first + 4].count(False) for first in (0, 4, 8)]


def test_mirrored_accuracy_is_of_the_last_epoch() -> None:
    run = run_of()
    run.step()
    counters = run.finish()
    module, autocast = run.training.module, run.training.autocast
    assert counters["mirrored_test_accuracy"] == run.evaluation(module, autocast, mirrored=True)[1]
    assert counters["test_accuracy_2"] == run.evaluation(module, autocast)[1]


def test_only_the_trained_loss_is_smoothed() -> None:
    plain, smooth = run_of(), run_of(label_smoothing=0.5)
    outputs, targets = torch.tensor([[4.0, 0.0, 0.0, 0.0]]), torch.tensor([0])
    log_sum = math.log(math.exp(4) + 3)
    assert float(plain.record.loss(outputs, targets)) == pytest.approx(log_sum - 4, rel=1e-5)
    assert float(smooth.record.loss(outputs, targets)) == pytest.approx(
        log_sum - 0.5 * 4 - 0.5 * 4 / 4, rel=1e-5
    )
    smooth.step()
    loss, _ = smooth.evaluation(smooth.training.module, smooth.training.autocast)
    smooth.training.module.eval()
    images = smooth.evaluation
    with torch.no_grad():
        outputs = smooth.training.module(normalized(images.pixels, torch.contiguous_format))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, images.labels)), rel=1e-5)


def norms_of(**fields: Any) -> list[float]:
    """Return the norm of all gradients together in each step of an epoch."""
    run, norms = run_of(epochs=1, **fields), list[float]()
    parameters = list(run.training.module.parameters())
    run.after_step = lambda _: norms.append(
        math.hypot(*(float(p.grad.norm()) for p in parameters if p.grad is not None))
    )
    run.step()
    assert run.finish().get("skipped_steps_1", 0) == 0
    return norms


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "fused"), [("fp32", False), ("fp16", False), ("fp16", True)])
def test_clipping_bounds_the_norm_of_unscaled_gradients(
    precision: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer, as on GPUs, divides by fp16's scale inside of its step, after the clipping."""
    sgd = torch.optim.SGD
    monkeypatch.setattr(
        torch.optim, "SGD", lambda groups, **fields: sgd(groups, **{**fields, "fused": fused})
    )
    assert precision == "fp16" or min(norms_of(precision=precision)) > 0.125
    assert norms_of(precision=precision, clip_norm=0.125) == pytest.approx([0.125] * 4, rel=1e-3)


class LeftBrightness(nn.Module):
    """A model whose two outputs are the brightness of the left and of the right half of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[3] // 2
        return torch.stack([x[..., :half].mean((1, 2, 3)), 2 * x[..., half:].mean((1, 2, 3))], 1)


def test_mirrored_evaluation_takes_the_mean_of_outputs() -> None:
    """The mean of the outputs for an image and its mirror image prefers the right half here."""
    images = synthetic_images(4)
    images.pixels.fill_(0)
    images.pixels[..., 16:] = 255
    images.pixels[0] = images.pixels[0].flip(2)  # the left half is bright
    images.labels.copy_(torch.tensor([0, 1, 1, 0]))
    evaluation, plain = Evaluation(images, SMALL, 0, CPU), lambda: torch.autocast("cpu", enabled=False)
    assert evaluation(LeftBrightness(), plain)[1] == 3 / 4
    assert evaluation(LeftBrightness(), plain, mirrored=True)[1] == 2 / 4


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_reported_loss_is_not_smoothed(accumulation_steps: int) -> None:
    """Compare first epochs, with a rate so small that both trainings are alike."""
    fields: dict[str, Any] = {"rate": 1e-9, "weight_decay": 0.0, "accumulation_steps": accumulation_steps}
    plain, smooth = run_of(**fields), run_of(**fields, label_smoothing=0.5)
    for each in (plain, smooth):
        each.step()
    assert learned(smooth)[0]["train_loss"] == pytest.approx(learned(plain)[0]["train_loss"], rel=1e-5)
    assert float(smooth.training.loss) != pytest.approx(float(plain.training.loss), rel=1e-3)


def test_an_evaluation_counts_each_image_once() -> None:
    images = synthetic_images(7)
    spec = dataclasses.replace(SMALL, world_size=3, strategy="ddp")
    found = [Evaluation(images, spec, rank, CPU) for rank in range(3)]
    assert sorted(len(each.labels) for each in found) == [2, 2, 3]
    assert (
        torch.cat([each.labels for each in found]).sort().values.tolist()
        == images.labels.sort().values.tolist()
    )


@pytest.mark.slow
def test_ranks_train_and_evaluate_together(two_ranks: Pool) -> None:
    two = dataclasses.replace(SMALL, world_size=2, strategy="ddp", per_rank_batch_size=8, epochs=1)
    (sample,) = two_ranks.measure(two).samples
    assert len(sample.seconds) == 1, "a run is one round"
    assert len(set(sample.counters["test_accuracy_1"])) == len(set(sample.counters["test_loss_1"])) == 1
    assert len(set(sample.counters["train_loss_1"])) == len(set(sample.counters["train_accuracy_1"])) == 1
    with pytest.raises(SetFailure, match=r"the loss (on the test images )?is nan (after|in) epoch 1"):
        two_ranks.measure(dataclasses.replace(two, model="resnet18", rate=1e3))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"warmup_epochs": 3}, "warmup_epochs=3 is more than the 2 epochs of the run; use less"),
    ({"per_rank_batch_size": 128}, "a batch of 128 images per rank is more than its 64 images of an epoch"),
    ({"grow_from": 32}, "grow_from=32 is more than a batch of 16; use less"),
    ({"input": "fixed"}, "training_run needs input device, got fixed"),
    ({"strategy": "fsdp"}, "training_run needs strategy single or ddp, got fsdp"),
    ({"strategy": "ddp", "comm_hook": "powersgd"}, "training_run needs comm_hook none or avg or bf16 or"),
    ({"drop_last": False}, "training_run needs drop_last True, got False"),
    ({"rate": 0}, "rate must be more than 0, got 0"),
    ({"momentum": 1.0}, "momentum must be between 0 and 1, got 1"),
    ({"clip_norm": -1.0}, "clip_norm must be a number from 0 to "),
    ({"precision": "fp16", "execution": "graph", "optimizer": "lars"}, "execution graph cannot capture lars"),
    ({"execution": "compile", "grow_from": 8}, "grow_from=8 needs execution eager or graph, got compile"),
    ({"optimizer": "lars", "nesterov": False}, "nesterov=False needs optimizer sgd, got lars"),
    ({"model": "resnet18", "grow_from": 1}, "last BatchNorm needs 2 images, got a batch of 1"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_a_wrong_recipe_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(SMALL, **fields)


def test_each_seed_has_other_orders_and_crops() -> None:
    """Also in later epochs, although the sampler adds the epoch to its seed."""
    orders, crops = set(), set()
    for seed in (0, 1, 2, 2**10):
        spec = dataclasses.replace(SMALL, seed=seed)
        images = DeviceInput(DeviceImages(load_images(spec), spec, CPU), EpochBatches(spec, 0))
        for epoch in range(3):
            images.begin(epoch)
            orders.add(tuple(images.plan[0].tolist()))
            crops.add(tuple(images.plan[1].tolist()))
    assert len(orders) == len(crops) == 4 * 3


def test_plain_recipe_trains_like_a_plain_loop() -> None:
    """The recipe "as it is" of perf/recipes.toml, with its BatchNorm statistics."""
    recipe = find_recipe("cpu", "16, as it is")
    spec = dataclasses.replace(recipe.like(SMALL), epochs=2)
    plain = dataclasses.replace(SMALL, nesterov=False, decay_vectors=True, schedule="constant", rate=0.1)
    assert spec == dataclasses.replace(plain, may_diverge=True)
    run = TrainingRun(spec, rank=0, device=CPU)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    take = run.training.take

    def taken() -> tuple[torch.Tensor, torch.Tensor]:
        batches.append(tuple(part.clone() for part in take()))  # type: ignore[arg-type]
        return batches[-1]

    run.training.take = taken
    run.warm_up(2)
    batches.clear()
    run.step()
    torch.manual_seed(spec.seed)
    model = build(spec.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert len(batches) == 8
    for name, value in run.training.module.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6)


def test_diverging_training_ends_with_chance() -> None:
    run = run_of(epochs=2, may_diverge=True)
    weight = next(run.training.module.parameters())

    def spoil(_: float) -> None:
        weight.data.fill_(math.nan)

    run.after_step = spoil
    run.step()
    counters = run.finish()
    assert counters["test_accuracy_2"] < 0.3
    assert not {"train_loss_1", "test_loss_1", "train_loss_2", "test_loss_2"} & counters.keys()
