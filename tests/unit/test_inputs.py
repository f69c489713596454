"""The inputs against torchvision: a batch holds the images that it should, cropped and flipped as one of all the ways."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddpperf.data.images import EpochBatches, Images, load_images
from ddpperf.data.inputs import (
    MEAN,
    STD,
    Batch,
    DeviceImages,
    DeviceInput,
    FixedInput,
    Input,
    LoaderInput,
    normalized,
    transform,
)
from tests.project import wait_until

CPU = torch.device("cpu")
COUNT = 12
WAYS = 81 * 2  # offsets of a crop, and flipped or not
# Not square, or height and width could be mixed up; and each image's label is its place.
IMAGES = Images(
    pixels=torch.randint(
        256, (COUNT, 3, 6, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    ),
    labels=torch.arange(COUNT),
)


def epoch_batches(
    rank: int = 0, world_size: int = 1, batch_size: int = 5, *, drop_last: bool = False
) -> EpochBatches:
    return EpochBatches(COUNT, world_size=world_size, rank=rank, batch_size=batch_size, drop_last=drop_last)


def device_input(
    rank: int = 0, world_size: int = 1, memory_format: torch.memory_format = torch.contiguous_format
) -> DeviceInput:
    return DeviceInput(DeviceImages(IMAGES, CPU, memory_format), epoch_batches(rank, world_size))


@pytest.fixture(scope="module")
def ways() -> Tensor:
    """By torchvision's functions, float32 [image, way, 3, H, W]: crop by crop, upright before flipped."""
    functional = pytest.importorskip("torchvision").transforms.functional
    height, width = IMAGES.pixels.shape[2:]
    padded = functional.pad(IMAGES.pixels, 4)
    crops = [functional.crop(padded, top, left, height, width) for top in range(9) for left in range(9)]
    both = torch.stack([each for crop in crops for each in (crop, functional.hflip(crop))], dim=1)
    made: Tensor = functional.normalize(functional.convert_image_dtype(both), MEAN, STD)
    return made


def epoch_of(source: DeviceInput | LoaderInput, number: int) -> list[Batch]:
    """An epoch's batches, as a training takes them; copies, for a loader's next one takes the last one's place."""
    source.begin(number)
    return [next_of(source) for _ in source.batches]


def next_of(source: Input) -> Batch:
    source.load()
    images, labels = source.take()
    return images.clone(), labels.clone()


def equal(some: list[Batch], others: list[Batch]) -> bool:
    """Whether these are the same batches, bit for bit."""
    pairs = [pair for batches in zip(some, others, strict=True) for pair in zip(*batches, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def ways_taken(batch: Batch, ways: Tensor) -> list[int]:
    """The one way in which each image of a batch was made from the original that its label names."""
    taken = []
    for image, label in zip(*batch, strict=True):
        (way,) = (ways[label] - image).abs().flatten(1).amax(1).lt(1e-5).nonzero().flatten().tolist()
        taken.append(int(way))
    return taken


def test_every_image_is_a_crop_of_its_original_in_one_of_all_ways(ways: Tensor) -> None:
    images, seen = device_input(), []
    for epoch in range(300):  # of 3,600 draws a way is missed with a chance of 2e-10
        for batch in epoch_of(images, epoch):
            seen += ways_taken(batch, ways)
    assert set(seen) == set(range(WAYS))
    assert sum(way % 2 for way in seen) / len(seen) == pytest.approx(0.5, abs=0.05)
    assert max(map(seen.count, range(WAYS))) < 4 * len(seen) / WAYS, "no way is much likelier than another"


def test_each_rank_and_epoch_has_ways_of_its_own(ways: Tensor) -> None:
    taken = {
        (rank, epoch): tuple(
            way for batch in epoch_of(device_input(rank, 2), epoch) for way in ways_taken(batch, ways)
        )
        for rank in range(2)
        for epoch in range(3)
    }
    assert len(set(taken.values())) == len(taken)
    assert all(len(set(each)) > 1 for each in taken.values()), "nor have all images of an epoch the same"


def test_an_epoch_made_again_is_the_same() -> None:
    before = torch.get_rng_state()
    again, other = epoch_of(device_input(), 1), device_input()
    epoch_of(other, 7)
    assert equal(again, epoch_of(other, 1))
    assert torch.equal(torch.get_rng_state(), before), "the model's own random numbers are left alone"


def test_each_rank_has_the_images_of_its_shard() -> None:
    shards = [
        [label for _, labels in epoch_of(device_input(rank, 2), 2) for label in labels.tolist()]
        for rank in range(2)
    ]
    assert sorted(label for shard in shards for label in shard) == list(range(COUNT))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_batch_has_the_memory_format_asked_for(memory_format: torch.memory_format) -> None:
    batches = epoch_of(device_input(memory_format=memory_format), 0)
    assert [len(images) for images, _ in batches] == [5, 5, 2]
    assert all(
        images.is_contiguous(memory_format=memory_format) and images.dtype == torch.float32
        for images, _ in batches
    )
    assert equal(batches, epoch_of(device_input(), 0))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_normalizing_is_torchvisions(memory_format: torch.memory_format) -> None:
    functional = pytest.importorskip("torchvision").transforms.functional
    ours = normalized(IMAGES.pixels, memory_format)
    assert ours.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(
        ours,
        functional.normalize(functional.convert_image_dtype(IMAGES.pixels), MEAN, STD),
        rtol=0,
        atol=1e-6,
    )


def test_a_fixed_input_is_the_same_batch_in_each_step_and_epoch() -> None:
    batch = torch.zeros(2, 3), torch.ones(2)
    fixed = FixedInput(batch)
    for epoch in range(2):
        fixed.begin(epoch)
        for _ in range(3):
            fixed.load()
            assert fixed.take() is batch
        fixed.prepare(epoch + 1)


def test_an_epoch_prepared_ahead_leaves_the_one_under_way_as_it_is() -> None:
    images, undisturbed = device_input(), epoch_of(device_input(), 3)
    images.begin(3)
    first = next_of(images)
    images.prepare(4)
    assert equal([first, next_of(images), next_of(images)], undisturbed)
    assert equal(epoch_of(images, 4), epoch_of(device_input(), 4))
    images.prepare(5)
    assert equal(epoch_of(images, 3), undisturbed), "whatever was prepared"


def test_taking_alone_goes_on_to_the_next_batch_of_the_same_addresses() -> None:
    """A graph repeats what it takes, and nothing of what this process does between; the epoch's plan is read where it was."""
    images, beside = (
        DeviceInput(DeviceImages(IMAGES, CPU, torch.contiguous_format), epoch_batches(batch_size=4))
        for _ in range(2)
    )
    places: list[int] = []
    for number in (0, 1):
        images.begin(number)
        images.load()
        assert equal([images.take() for _ in range(3)], epoch_of(beside, number))
        places.append(images.plan.data_ptr())
    assert places[0] == places[1]


# --- torch's DataLoader


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Images]:
    """As processes that load take them: from a file, named by what can be sent to them."""
    path = tmp_path_factory.mktemp("images") / "images.pt"
    torch.save({"train_images": IMAGES.pixels, "train_labels": IMAGES.labels}, path)
    return partial(load_images, str(path), COUNT)


@pytest.fixture
def loaders() -> Iterator[None]:
    """No process that loads is left over from before, or afterwards."""
    assert multiprocessing.active_children() == []
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("loaders")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_each_batch_the_same_images_and_ends_its_processes(
    workers: int, load: Callable[[], Images], ways: Tensor
) -> None:
    pytest.importorskip("torchvision")
    batches = epoch_batches(rank=1, world_size=2, batch_size=4)
    loader = LoaderInput(load, batches, workers=workers, device=CPU, memory_format=torch.channels_last)
    expected = DeviceInput(DeviceImages(IMAGES, CPU, torch.contiguous_format), batches)
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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_dataloaders_batches_of_one_size_lie_in_one_place(
    load: Callable[[], Images], memory_format: torch.memory_format
) -> None:
    """Where a graph reads them; an epoch's last and smaller one lies elsewhere."""
    pytest.importorskip("torchvision")
    loader = LoaderInput(
        load, epoch_batches(batch_size=5), workers=0, device=CPU, memory_format=memory_format
    )
    loader.begin(0)
    places, taken = [], []
    for _ in range(3):
        loader.load()
        images, labels = loader.take()
        assert images.is_contiguous(memory_format=memory_format)
        places.append((images.data_ptr(), labels.data_ptr()))
        taken.append(labels.tolist())
    assert places[0] == places[1]
    assert [len(each) for each in taken] == [5, 5, 2]
    assert len({label for each in taken for label in each}) == COUNT


def parent_of(process: int) -> int:
    return int(Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[1])


def test_a_dataloaders_image_is_cropped_to_its_own_size(ways: Tensor) -> None:
    pytest.importorskip("torchvision")
    crop = transform(IMAGES.pixels.shape[2:])
    batch = torch.stack([crop(IMAGES.pixels[3]) for _ in range(400)]), torch.full((400,), 3)
    taken = ways_taken(batch, ways)
    assert len(set(taken)) > 0.8 * WAYS
    assert sum(way % 2 for way in taken) / 400 == pytest.approx(0.5, abs=0.1)


def test_without_torchvision_a_dataloader_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ImportError, match=r"^input dataloader needs torchvision, which is not installed; install it$"
    ):
        transform((6, 7))
