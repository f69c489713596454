"""The synthetic images: reproducible, different on every rank, and learnable from one batch for another."""

from __future__ import annotations

import pytest
import torch

from ddpperf.data import IMAGE_SHAPE, NUM_CLASSES, synthetic_batch


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_a_batch_has_the_shape_of_cifar10(batch_size: int) -> None:
    images, labels = synthetic_batch(batch_size, seed=0)
    assert (images.shape, images.dtype) == ((batch_size, *IMAGE_SHAPE), torch.float32)
    assert (labels.shape, labels.dtype) == ((batch_size,), torch.int64)


def test_labels_are_of_every_class() -> None:
    _, labels = synthetic_batch(1000, seed=0)
    assert labels.unique().tolist() == list(range(NUM_CLASSES))


def test_equal_seeds_give_equal_batches() -> None:
    for first, second in zip(synthetic_batch(8, seed=3), synthetic_batch(8, seed=3), strict=True):
        assert torch.equal(first, second)


def test_each_rank_has_a_batch_of_its_own() -> None:
    batches = [synthetic_batch(16, seed=rank) for rank in range(8)]
    for rank, (images, labels) in enumerate(batches):
        for other_images, other_labels in batches[:rank]:
            assert not torch.equal(labels, other_labels)
            assert not torch.isclose(images, other_images).all(dim=(1, 2, 3)).any()


def test_what_one_batch_teaches_holds_in_another() -> None:
    images, labels = synthetic_batch(500, seed=0)
    means = torch.stack([images[labels == label].mean(0) for label in range(NUM_CLASSES)])
    others, expected = synthetic_batch(200, seed=1)
    nearest = torch.cdist(others.flatten(1), means.flatten(1)).argmin(1)
    assert torch.equal(nearest, expected)


def test_images_of_a_class_are_not_all_the_same() -> None:
    images, labels = synthetic_batch(200, seed=0)
    of_one_class = images[labels == 0]
    assert of_one_class.std(0).mean().item() == pytest.approx(1, abs=0.1)


def test_the_callers_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    synthetic_batch(4, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
