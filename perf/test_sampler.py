"""Sampler: does DistributedSampler give each rank its own images, shuffled in each epoch?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ddpperf.plugin.cases import Case, case
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import SamplerSpec

COUNTED = ("missing_images", "repeated_images", "repeated_places")


def samplers(options: Options, *, set_epoch: bool) -> Iterator[Case]:
    """Yield the specs of DistributedSamplers, for each world size.

    set_epoch: whether set_epoch is called before each epoch. If it is, samplers with and without
    drop_last are yielded, else only those without. The number of images is odd, so that it does not
    divide over an even number of ranks. It is at least 64 per rank, so that two shuffled orders do
    not agree by chance. The core suite uses the largest world size only.
    """
    for N in options.world_sizes:
        images = max(options.epoch_images, 64 * N) | 1
        for drop_last in (False, True) if set_epoch else (False,):
            sampler = SamplerSpec(world_size=N, epoch_images=images, drop_last=drop_last, set_epoch=set_epoch)
            yield case(sampler, core=max(options.world_sizes) == N)


@pytest.mark.specs(cases=partial(samplers, set_epoch=True))
def test_shards_are_disjoint_and_cover_the_data(measure: Measure, spec: SamplerSpec) -> None:
    """Is each image of an epoch given to exactly one rank?

    The images that do not divide over the ranks are dropped or repeated.
    """
    missing, repeated, same = sampled(measure, spec)
    rest = spec.epoch_images % spec.world_size
    assert missing == (rest if spec.drop_last else 0)
    assert repeated == (0 if spec.drop_last or not rest else spec.world_size - rest)
    assert same < 0.5, (
        f"{same:.0%} of a shard's places have the same image in the next epoch, so it was not shuffled"
    )


@pytest.mark.specs(cases=partial(samplers, set_epoch=False))
def test_without_set_epoch_the_epochs_repeat(measure: Measure, spec: SamplerSpec) -> None:
    """Does every epoch have the same order of images if set_epoch is not called?"""
    _, _, same = sampled(measure, spec)
    assert same == 1


def sampled(measure: Measure, spec: SamplerSpec) -> tuple[float, float, float]:
    """Measure a DistributedSampler; store and return counts of missing and repeated images.

    The third result is the fraction of a rank's images that have the same place in the next epoch.
    Each result is the maximum over process sets.
    """
    shards = measure(spec)
    counted = {name: shards.counter(name) for name in COUNTED}
    for name, by_set in counted.items():
        measure.metric(name, by_set)
    return tuple(max(by_set.values()) for by_set in counted.values())  # type: ignore[return-value]
