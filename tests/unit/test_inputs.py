"""Inputs compared with torchvision: a batch holds the right images, cropped and flipped in an
allowed way.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpperf.data.augmentation import Batch, DeviceImages
from ddpperf.data.images import MEAN, STD, Images, normalized
from ddpperf.data.inputs import DeviceInput, Input, LoaderInput
from ddpperf.data.sampler import EpochBatches
from ddpperf.specs import EpochSpec
from ddpperf.specs.training_step import DATA_VARIABLE
from tests.project import wait_until

CPU = torch.device("cpu")
COUNT = 12
WAYS = 81 * 2  # offsets of a crop, and flipped or not
# Not square, so that exchanged height and width are found. Each image's label is its index.
IMAGES = Images(
    pixels=torch.randint(
        256, (COUNT, 3, 6, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    ),
    labels=torch.arange(COUNT),
)


def spec_of(world_size: int = 1, batch_size: int = 5, **fields: Any) -> EpochSpec:
    return EpochSpec(
        model="resnet18_cifar",
        world_size=world_size,
        per_rank_batch_size=batch_size,
        strategy="ddp",
        data="mine",
        epoch_images=COUNT,
        drop_last=False,
        **{"input": "device"} | fields,
    )


def device_input(rank: int = 0, world_size: int = 1, batch_size: int = 5) -> DeviceInput:
    spec = spec_of(world_size, batch_size)
    return DeviceInput(DeviceImages(IMAGES, spec, CPU), EpochBatches(spec, rank))


@pytest.fixture(scope="module")
def ways() -> Tensor:
    """Return all allowed crops and flips by torchvision, float32 [image, way, 3, H, W]."""
    functional = pytest.importorskip("torchvision").transforms.functional
    height, width = IMAGES.pixels.shape[2:]
    padded = functional.pad(IMAGES.pixels, 4)
    crops = [functional.crop(padded, top, left, height, width) for top in range(9) for left in range(9)]
    both = torch.stack([each for crop in crops for each in (crop, functional.hflip(crop))], dim=1)
    made: Tensor = functional.normalize(functional.convert_image_dtype(both), MEAN, STD)
    return made


def epoch_of(source: DeviceInput | LoaderInput, number: int) -> list[Batch]:
    """Return copies of an epoch's batches, since a loader overwrites its last batch."""
    source.begin(number)
    return [next_of(source) for _ in source.batches]


def next_of(source: Input) -> Batch:
    source.load()
    images, labels = source.take()
    return images.clone(), labels.clone()


def equal(some: list[Batch], others: list[Batch]) -> bool:
    pairs = [pair for batches in zip(some, others, strict=True) for pair in zip(*batches, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def ways_taken(batch: Batch, ways: Tensor) -> list[int]:
    """Return the crop and flip of each image; its label is the index of the original."""
    taken = []
    for image, label in zip(*batch, strict=True):
        (way,) = (ways[label] - image).abs().flatten(1).amax(1).lt(1e-5).nonzero().flatten().tolist()
        taken.append(int(way))
    return taken


def test_all_crops_and_flips_occur_equally_often(ways: Tensor) -> None:
    images, seen = device_input(), []
    for epoch in range(300):  # in 3,600 draws a way is missed with a chance of 2e-10
        for batch in epoch_of(images, epoch):
            seen += ways_taken(batch, ways)
    assert set(seen) == set(range(WAYS))
    assert sum(way % 2 for way in seen) / len(seen) == pytest.approx(0.5, abs=0.05)
    assert max(map(seen.count, range(WAYS))) < 4 * len(seen) / WAYS, "no way is much likelier than another"


def test_ranks_and_epochs_have_different_crops(ways: Tensor) -> None:
    taken = {
        (rank, epoch): tuple(
            way for batch in epoch_of(device_input(rank, 2), epoch) for way in ways_taken(batch, ways)
        )
        for rank in range(2)
        for epoch in range(3)
    }
    assert len(set(taken.values())) == len(taken)
    assert all(len(set(each)) > 1 for each in taken.values()), "nor have all images of an epoch the same"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_normalized_equals_torchvision(memory_format: torch.memory_format) -> None:
    functional = pytest.importorskip("torchvision").transforms.functional
    ours = normalized(IMAGES.pixels, memory_format)
    theirs = functional.normalize(functional.convert_image_dtype(IMAGES.pixels), MEAN, STD)
    assert ours.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_preparing_ahead_keeps_the_current_epoch() -> None:
    images, undisturbed = device_input(), epoch_of(device_input(), 3)
    images.begin(3)
    first = next_of(images)
    images.prepare(4)
    assert equal([first, next_of(images), next_of(images)], undisturbed)
    assert equal(epoch_of(images, 4), epoch_of(device_input(), 4))
    images.prepare(5)
    assert equal(epoch_of(images, 3), undisturbed), "whatever was prepared"


def test_repeated_take_gives_all_batches() -> None:
    """A graph repeats only `take`, and reads the epoch's plan at a fixed address."""
    images, beside = device_input(batch_size=4), device_input(batch_size=4)
    places: list[int] = []
    for number in (0, 1):
        images.begin(number)
        images.load()
        assert equal([images.take() for _ in range(3)], epoch_of(beside, number))
        places.append(images.plan.data_ptr())
    assert places[0] == places[1]


# --- torch's DataLoader


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the images in the file that loader processes open."""
    torch.save({"train_images": IMAGES.pixels, "train_labels": IMAGES.labels}, tmp_path / "images.pt")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "images.pt"))


def loader_input(rank: int = 0, workers: int = 0, **fields: int) -> LoaderInput:
    loader: dict[str, Any] = {
        "input": "dataloader",
        "loader_workers": workers,
        "memory_format": "channels_last",
    }
    spec = spec_of(**fields, **loader)
    return LoaderInput(spec, EpochBatches(spec, rank), CPU)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_dataloader_has_same_batches_and_ends_its_processes(workers: int, ways: Tensor) -> None:
    loader = loader_input(1, workers, world_size=2, batch_size=4)
    expected = device_input(rank=1, world_size=2, batch_size=4)
    taken: dict[int, list[int]] = {}
    processes: list[int] = []
    for epoch in (0, 1, 5):
        made = epoch_of(loader, epoch)
        assert [labels.tolist() for _, labels in made] == [
            labels.tolist() for _, labels in epoch_of(expected, epoch)
        ]
        assert all(images.is_contiguous(memory_format=torch.channels_last) for images, _ in made)
        taken[epoch] = [way for batch in made for way in ways_taken(batch, ways)]
        processes.append(len(multiprocessing.active_children()))
    assert processes == [workers] * 3, "they stay from one epoch to the next"
    assert len({tuple(each) for each in taken.values()}) == 3
    ids = [each.pid for each in multiprocessing.active_children() if each.pid is not None]
    assert all(parent_of(process) != os.getpid() for process in ids), (
        "a server forks them: this process has CUDA in use"
    )
    del loader
    gc.collect()
    wait_until(
        lambda: not any(Path("/proc", str(each)).exists() for each in ids), 2, lambda: f"left running: {ids}"
    )


@pytest.mark.usefixtures("stored")
def test_dataloader_batches_share_an_address() -> None:
    """A graph reads them there; the smaller last batch of an epoch is elsewhere."""
    pytest.importorskip("torchvision")
    loader = loader_input()
    loader.begin(0)
    places, taken = [], []
    for _ in range(3):
        loader.load()
        images, labels = loader.take()
        assert images.is_contiguous(memory_format=torch.channels_last)
        places.append((images.data_ptr(), labels.data_ptr()))
        taken += [labels.tolist()]
    assert places[0] == places[1]
    assert [len(batch) for batch in taken] == [5, 5, 2]
    assert len({label for batch in taken for label in batch}) == COUNT


def parent_of(process: int) -> int:
    return int(Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[1])
