"""Cutout hides one square of each image, at a place drawn for epoch and seed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ddpperf.data.images import Images
from ddpperf.data.inputs import DeviceImages, DeviceInput
from ddpperf.errors import CannotTrain
from ddpperf.specs import RunSpec
from ddpperf.training.task import epoch_batches, make_task

COUNT, HEIGHT, WIDTH = 1024, 7, 9
IMAGES = Images(
    pixels=torch.randint(
        1, 100, (COUNT, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    ),
    labels=torch.arange(COUNT),
)
SPEC = RunSpec(
    model="resnet10_cifar",
    world_size=1,
    per_rank_batch_size=COUNT // 2,
    strategy="single",
    input="device",
    epoch_images=COUNT,
    test_images=1,
    epochs=1,
    rate=0.1,
)
CPU = torch.device("cpu")


def epoch(cutout: int, number: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    batches = epoch_batches(dataclasses.replace(SPEC, seed=seed), 0)
    source = DeviceInput(DeviceImages(IMAGES, CPU, torch.channels_last, cutout=cutout), batches)
    source.begin(number)
    taken = []
    for _ in batches:
        source.load()
        taken.append(source.take())
        assert taken[-1][0].is_contiguous(memory_format=torch.channels_last)
    images, labels = map(torch.cat, zip(*taken, strict=True))
    return images, labels


def hidden_of(cutout: int, number: int = 0, seed: int = 0) -> Tensor:
    """Return the hidden pixels, bool [N, H, W]; check that all others are unchanged."""
    (plain, labels), (cut, as_before) = epoch(0, number, seed), epoch(cutout, number, seed)
    assert torch.equal(labels, as_before)
    assert plain.abs().min() > 1e-3, "no pixel is the mean by itself"
    changed = cut != plain
    assert torch.equal(changed, changed.any(1, keepdim=True).expand_as(changed)), "all channels, or none"
    assert not cut[changed].any(), "hidden is the data set's mean"
    return changed.any(1)


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_square_around_any_pixel_is_hidden(side: int) -> None:
    seen = set()
    for image in hidden_of(side):
        rows, columns = (image.any(dim).nonzero().flatten().tolist() for dim in (1, 0))
        assert image.sum() == len(rows) * len(columns), "a whole rectangle"
        seen.add((rows[0], rows[-1], columns[0], columns[-1]))
    first, last = -(side // 2), side - side // 2 - 1  # from the middle
    assert seen == {
        (
            max(0, row + first),
            min(HEIGHT - 1, row + last),
            max(0, column + first),
            min(WIDTH - 1, column + last),
        )
        for row in range(HEIGHT)
        for column in range(WIDTH)
    }


def test_squares_depend_on_epoch_and_seed() -> None:
    seen = {(number, seed): hidden_of(2, number, seed) for number in (0, 1) for seed in (0, 1)}
    assert torch.equal(seen[1, 1], hidden_of(2, 1, 1))
    assert len({hidden.numpy().tobytes() for hidden in seen.values()}) == 4


def test_run_trains_with_its_cutout() -> None:
    hidden = {}
    for cutout in (0, 8):
        source = make_task(
            dataclasses.replace(SPEC, per_rank_batch_size=64, epoch_images=64, cutout=cutout), 0, CPU
        ).input
        source.begin(0)
        source.load()
        images, _ = source.take()
        hidden[cutout] = (images == 0).all(1).sum((1, 2))
    assert hidden[0].max() == 0
    assert hidden[8].min() >= 4 * 4
    assert hidden[8].max() == 8 * 8


def test_square_larger_than_images_is_refused() -> None:
    make_task(dataclasses.replace(SPEC, cutout=63), 0, CPU)
    with pytest.raises(
        CannotTrain, match=r"^cutout=64 hides all of images of 32 x 32 pixels, wherever it is; use less$"
    ):
        make_task(dataclasses.replace(SPEC, cutout=64), 0, CPU)
