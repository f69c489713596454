"""An epoch in process: every image once, progress reports, and a new order each epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.specs import EpochSpec
from ddpperf.specs.training_step import DATA_VARIABLE
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.models import MODELS, Loss
from ddpperf.training.schedules import PEAK_RATE, scheduled_rates
from ddpperf.training.step import TrainingStep
from ddpperf.workers import worker

IMAGES = 22


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide a small model, and a data set in which each image's label is its index."""
    monkeypatch.setitem(MODELS, "resnet18", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, IMAGES)))
    pixels = torch.randint(
        256, (IMAGES, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    torch.save({"train_images": pixels, "train_labels": torch.arange(IMAGES)}, tmp_path / "images.pt")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "images.pt"))


def epoch_of(loss: Loss | None = None, **fields: Any) -> TrainingEpoch:
    values: dict[str, Any] = {
        "per_rank_batch_size": 4,
        "input": "device",
        "data": "mine",
        "epoch_images": IMAGES,
        "drop_last": False,
    }
    spec = EpochSpec(world_size=1, strategy="single", **values | fields)
    step = TrainingStep(spec, rank=0, device=torch.device("cpu"), loss=loss)
    return TrainingEpoch(MeasuredStep(step))


class Watched:
    """An epoch; which labels it trained on, batch by batch, and how often the optimizer stepped."""

    def __init__(self, **fields: Any) -> None:
        self.labels: list[list[int]] = []
        self.updates = 0
        self.epoch = epoch_of(self._watch, **fields)
        self.epoch.training.training.optimizer.register_step_post_hook(self._count)

    def _watch(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.labels.append(targets.tolist())
        return F.cross_entropy(outputs, targets)

    def _count(self, *_: Any) -> None:
        self.updates += 1

    def images(self) -> list[int]:
        return [label for batch in self.labels for label in batch]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("input", ["device", "dataloader"])
def test_an_epoch_trains_every_image_once(input: str) -> None:
    if input == "dataloader":
        pytest.importorskip("torchvision")
    watched = Watched(input=input)
    epoch = watched.epoch
    epoch.step()
    first = watched.images()
    assert (watched.updates, [len(batch) for batch in watched.labels]) == (6, [4, 4, 4, 4, 4, 2])
    assert sorted(first) == list(range(IMAGES)) != first
    epoch.step()
    assert watched.updates == 12
    assert sorted(watched.images()[IMAGES:]) == list(range(IMAGES))
    assert watched.images()[IMAGES:] != first, "the next epoch is shuffled anew"


@pytest.mark.usefixtures("small")
def test_the_first_epoch_is_the_warm_up() -> None:
    watched, expected = Watched(), Watched()
    watched.epoch.warm_up(2)
    assert watched.epoch.training.steps == 6
    watched.labels.clear()
    watched.epoch.step()
    expected.epoch.step()
    expected.epoch.step()
    assert watched.labels == expected.labels[6:], "the timed one is the second"


@pytest.mark.usefixtures("small")
def test_equal_batches_need_a_short_warm_up() -> None:
    watched = Watched(drop_last=True)
    watched.epoch.warm_up(2)
    assert watched.epoch.training.steps == 2
    source: Any = watched.epoch.training.training.input
    assert source.prepared[0] == watched.epoch.training.epoch, "as after any epoch"
    watched.labels.clear()
    watched.epoch.step()
    assert [len(batch) for batch in watched.labels] == [4] * 5, "the timed epoch is a whole one"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("input", ["fixed", "device"])
def test_a_timed_epoch_has_the_whole_schedule(input: str) -> None:
    epoch, rates = epoch_of(input=input), list[float]()
    epoch.warm_up(2)
    epoch.training.training.optimizer.register_step_pre_hook(
        lambda *_: rates.append(epoch.training.training.optimizer.param_groups[0]["lr"])
    )
    epoch.step()
    epoch.step()
    assert rates == scheduled_rates("cosine", PEAK_RATE, steps=6, warm_up=0) * 2


@pytest.mark.usefixtures("small")
def test_next_epoch_is_prepared_while_the_device_still_trains() -> None:
    epoch = epoch_of()
    epoch.step()
    source: Any = epoch.training.training.input
    assert source.prepared[0] == epoch.training.epoch == 1


def test_progress_is_sent_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = iter((0.0, 0.5, 1.1, 2.0, 2.2, 30.0)), list[float]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(now)))
    report = worker.seldom(sent.append)
    for fraction in (0.1, 0.2, 0.3, 0.4, 0.5):
        report(fraction)
    assert sent == [0.2, 0.4, 0.5]
