"""The sampler measured on real ranks: the shards together hold the whole data set."""

from __future__ import annotations

import pytest

from ddpperf.specs import SamplerSpec
from ddpperf.workers.pool import Pool


def counted(pool: Pool, spec: SamplerSpec) -> tuple[set[float], set[float], tuple[float, ...]]:
    """Return missing and repeated images, and each rank's fraction of repeated places."""
    (sample,) = pool.measure(spec).samples
    assert {len(ranks) for ranks in sample.seconds} == {spec.world_size}
    counters = sample.counters
    return set(counters["missing_images"]), set(counters["repeated_images"]), counters["repeated_places"]


@pytest.mark.parametrize(
    ("world_size", "images", "drop_last", "missing", "repeated"),
    [
        (1, 129, False, 0, 0),
        (2, 129, False, 0, 1),
        (2, 129, True, 1, 0),
        (2, 130, True, 0, 0),
    ],
)
def test_shards_cover_the_images(
    two_ranks: Pool, world_size: int, images: int, drop_last: bool, missing: int, repeated: int
) -> None:
    spec = SamplerSpec(world_size=world_size, epoch_images=images, drop_last=drop_last)
    assert spec.shard.images * world_size == images - missing + repeated
    places: tuple[float, ...]
    *found, places = counted(two_ranks, spec)
    assert found == [{missing}, {repeated}]
    assert max(places) < 0.2, "the next epoch is shuffled anew"


def test_next_epoch_repeats_without_set_epoch(two_ranks: Pool) -> None:
    missing, repeated, places = counted(
        two_ranks, SamplerSpec(world_size=2, epoch_images=129, set_epoch=False)
    )
    assert (missing, repeated, places) == ({0}, {1}, (1.0, 1.0))
