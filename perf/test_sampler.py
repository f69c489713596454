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
    most = sampled(measure, spec)
    rest, same = spec.epoch_images % spec.world_size, most["repeated_places"]
    assert most["missing_images"] == (rest if spec.drop_last else 0)
    assert most["repeated_images"] == (0 if spec.drop_last or not rest else spec.world_size - rest)
    assert same < 0.5, (
        f"{same:.0%} of a shard's places have the same image in the next epoch, so it was not shuffled"
    )


@pytest.mark.specs(cases=partial(samplers, set_epoch=False))
def test_without_set_epoch_the_epochs_repeat(measure: Measure, spec: SamplerSpec) -> None:
    """Does every epoch have the same order of images if set_epoch is not called?"""
    assert sampled(measure, spec)["repeated_places"] == 1


def sampled(measure: Measure, spec: SamplerSpec) -> dict[str, float]:
    """Measure a DistributedSampler, store its counts, and return the maximum of each over process sets."""
    shards = measure(spec)
    for name in COUNTED:
        measure.metric(name, shards.counter(name))
    return {name: max(shards.counter(name).values()) for name in COUNTED}
