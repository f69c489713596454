"""CutMix, the size of a random crop, and last epochs without random crops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ddpperf.data.augmentation import DeviceImages
from ddpperf.data.images import Images, normalized
from ddpperf.data.inputs import DeviceInput
from ddpperf.data.sampler import EpochBatches
from ddpperf.specs import RunSpec

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

WHOLE = dataclasses.replace(SPEC, crop_padding=0)  # padding would look the same in all images
TWO_CLASSES = Images(pixels=IMAGES.pixels, labels=IMAGES.labels % 2)


def epoch(spec: RunSpec, number: int = 0, images: Images = IMAGES) -> tuple[Tensor, Tensor]:
    """Return all images and labels of one epoch, in batches of half an epoch."""
    source = DeviceInput(DeviceImages(images, spec, CPU), EpochBatches(spec, 0))
    source.begin(number)
    taken = []
    for _ in range(2):
        source.load()
        taken.append(source.take())
    pixels, labels = map(torch.cat, zip(*taken, strict=True))
    return pixels, labels


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_rectangles_show_the_image_before(fraction: float) -> None:
    plain, labels = epoch(WHOLE)
    mixed, _ = epoch(dataclasses.replace(WHOLE, cutmix=fraction))
    before = torch.cat([half.roll(1, 0) for half in plain.chunk(2)])
    changed = (mixed != plain).any(1)
    shown = torch.where(changed[:, None], before, plain)
    assert torch.equal(mixed, shown), "all channels of the image before"
    for image in changed[:64]:
        rows, columns = (image.any(dim).nonzero().flatten().tolist() for dim in (1, 0))
        assert image.sum() == len(rows) * len(columns), "a whole rectangle"
    assert abs(changed.any((1, 2)).float().mean().item() - fraction) < 0.08  # some rectangles are empty
    assert len(labels) == COUNT


def test_labels_are_the_visible_fractions() -> None:
    spec = dataclasses.replace(WHOLE, cutmix=1.0)
    plain, _ = epoch(WHOLE)
    _, labels = epoch(WHOLE, images=TWO_CLASSES)
    mixed, probabilities = epoch(spec, images=TWO_CLASSES)
    hidden = (mixed != plain).any(1).float().mean((1, 2))
    before = torch.cat([half.roll(1, 0) for half in labels.chunk(2)])
    expected = torch.where(before == labels, 1.0, 1 - hidden)
    assert probabilities.shape == (COUNT, 2)
    torch.testing.assert_close(probabilities.gather(1, labels[:, None])[:, 0], expected)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(COUNT))


def test_last_epochs_have_no_random_crops() -> None:
    spec = dataclasses.replace(SPEC, epochs=3, uncropped_epochs=1)
    originals = normalized(IMAGES.pixels, torch.channels_last)
    for number, is_cropped in ((1, True), (2, False)):
        pixels, labels = epoch(spec, number)
        original = originals[labels]
        is_whole = (pixels - original).abs().amax((1, 2, 3)) < 1e-5
        is_mirrored = (pixels - original.flip(3)).abs().amax((1, 2, 3)) < 1e-5
        assert bool((is_whole | is_mirrored).all()) is not is_cropped


def test_padding_bounds_the_random_crop() -> None:
    first, _, last = (0, 0), None, (2, 2)
    spec = dataclasses.replace(SPEC, crop_padding=1)
    images = DeviceImages(IMAGES, spec, CPU)
    plan = images.plan(torch.arange(COUNT), torch.Generator().manual_seed(0))
    assert (tuple(plan[1:3].amin(1).tolist()), tuple(plan[1:3].amax(1).tolist())) == (first, last)
    assert images.padded.shape == (COUNT, HEIGHT + 2, WIDTH + 2, 3)
