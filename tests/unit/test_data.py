"""Synthetic and stored images, and how an epoch of them is split between ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.data.images import NUM_CLASSES, load_images, synthetic_images
from ddpperf.data.sampler import EpochBatches
from ddpperf.specs import EpochSpec, RunSpec
from ddpperf.specs.training_step import DATA_VARIABLE, Strategy
from tests.generated import BOUNDED


def test_synthetic_images_can_be_learned() -> None:
    images = synthetic_images(700)
    pixels, labels = images.pixels.float().flatten(1), images.labels
    means = torch.stack([pixels[:500][labels[:500] == label].mean(0) for label in range(NUM_CLASSES)])
    assert torch.equal(torch.cdist(pixels[500:], means).argmin(1), labels[500:])


@pytest.mark.parametrize(("count", "found"), [(4, 4), (100, 6)])
def test_file_gives_its_first_images(
    tmp_path: Path, count: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = torch.randint(256, (6, 3, 4, 5), dtype=torch.uint8)
    stored = {"train_images": pixels, "train_labels": torch.arange(6)}
    torch.save(stored, tmp_path / "images.pt")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "images.pt"))
    images = load_images(spec_of(count, 1, 1, drop_last=True, data="mine"))
    assert torch.equal(images.pixels, pixels[:found])
    assert images.labels.tolist() == list(range(found))


# --- an epoch's batches


def spec_of(images: int, world_size: int, batch_size: int, drop_last: bool, **fields: Any) -> EpochSpec:
    values: dict[str, Any] = {"strategy": "ddp", "input": "device", "drop_last": drop_last} | fields
    return EpochSpec(
        model="resnet18_cifar",
        world_size=world_size,
        per_rank_batch_size=batch_size,
        epoch_images=images,
        **values,
    )


counts: dict[str, st.SearchStrategy[Any]] = {
    "images": st.integers(1, 80),
    "world_size": st.integers(1, 8),
    "batch_size": st.integers(1, 24),
    "drop_last": st.booleans(),
}


def batches_of_ranks(
    images: int, world_size: int, batch_size: int, drop_last: bool, epoch: int = 0
) -> list[list[list[int]]]:
    spec = spec_of(images, world_size, batch_size, drop_last)
    ranks = [EpochBatches(spec, rank) for rank in range(world_size)]
    for each in ranks:
        each.set_epoch(epoch)
    return [list(each) for each in ranks]


@BOUNDED
@given(**counts, epoch=st.integers(0, 5))
def test_ranks_share_the_images_equally(
    images: int, world_size: int, batch_size: int, drop_last: bool, epoch: int
) -> None:
    """With drop_last no image comes twice; without it all come, and only the last places repeat
    some.
    """
    images = max(images, world_size)
    ranks = batches_of_ranks(images, world_size, batch_size, drop_last, epoch)
    sizes = [[len(batch) for batch in rank] for rank in ranks]
    assert all(each == sizes[0] for each in sizes), "no rank waits for another's step"
    shard = images // world_size if drop_last else -(-images // world_size)
    if shard < batch_size:
        assert sizes[0] == [batch_size]
        for (batch,) in ranks:
            assert batch == [batch[place % shard] for place in range(batch_size)], "it wraps around"
        ranks = [[batch[:shard]] for (batch,) in ranks]
    elif drop_last:
        assert sizes[0] == [batch_size] * (shard // batch_size)
    else:
        assert set(sizes[0][:-1]) <= {batch_size}
        assert sum(sizes[0]) == shard
    seen = Counter(index for rank in ranks for batch in rank for index in batch)
    if drop_last:
        assert set(seen.values()) == {1}
        assert seen.keys() <= set(range(images))
    else:
        assert seen.keys() == set(range(images))
        assert max(seen.values()) <= 2


@BOUNDED
@given(**counts, strategy=st.sampled_from(("ddp", "data_parallel", "single")))
def test_spec_counts_steps_and_images_of_an_epoch(
    images: int, world_size: int, batch_size: int, drop_last: bool, strategy: Strategy
) -> None:
    """Compares with enumerated batches; data_parallel is one process with all ranks' images."""
    world_size = 1 if strategy == "single" else max(world_size, 2)
    images = max(images, world_size)
    spec = spec_of(images, world_size, batch_size, drop_last, strategy=strategy)
    processes, process_batch = (world_size, batch_size) if strategy == "ddp" else (1, world_size * batch_size)
    enumerated = batches_of_ranks(images, processes, process_batch, drop_last)
    assert (spec.processes, spec.process_batch_size) == (processes, process_batch)
    assert {len(rank) for rank in enumerated} == {spec.steps_per_epoch}
    assert sum(len(batch) for rank in enumerated for batch in rank) == spec.images_per_epoch


def test_test_images_differ_and_share_coarse_patterns() -> None:
    fields = {**vars(spec_of(300, 1, 4, drop_last=True)), "strategy": "single"}
    spec = RunSpec(**fields, epochs=1, test_images=300, rate=0.1)
    train, test = (load_images(spec, part) for part in ("train", "test"))
    assert len(torch.cat([train.pixels, test.pixels]).unique(dim=0)) == 600
    classes = range(NUM_CLASSES)
    patterns = [
        torch.stack([each.pixels[each.labels == label].float().mean(0) for label in classes])
        for each in (train, test)
    ]
    assert (patterns[0] - patterns[1]).abs().mean() < 15, "of the same classes"
    steps = (patterns[0][..., 1:] - patterns[0][..., :-1]).abs().mean()
    assert steps < (patterns[0][..., 8:] - patterns[0][..., :-8]).abs().mean() / 2, (
        "what lies beside each other is alike"
    )
