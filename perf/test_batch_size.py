"""Batch size: how fast is an epoch with small and large batches, does loading the images hold it up, and which batch fits?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from statistics import median

import pytest

from ddpperf.analysis.loading import LEAST_SHARE, enough_workers, loading_share
from ddpperf.analysis.search import largest_that_fits
from ddpperf.plugin.cases import Case, if_valid, size_id, skipped, without_torchvision
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, TrainingSpec, is_custom_model
from perf.common.metrics import training_metrics

WORKERS = (0, 1, 2, 4, 8)
SMALLEST = 32  # of the batches that are tried until one does not fit
CPU_BATCH_SIZE, GPU_BATCH_SIZE = 128, 512  # for the number of workers


def epochs(options: Options) -> Iterator[Case]:
    """Without loading, from images on the device, and through a DataLoader; on the CPU the device is where a loader is, too."""
    for batch_size in options.batch_sweep:
        epoch = options.epoch(world_size=1, per_rank_batch_size=batch_size)
        yield epoch
        if not is_custom_model(options.model):
            if options.device == "cuda" or batch_size == min(options.batch_sweep):
                yield dataclasses.replace(epoch, input="device")
            yield without_torchvision(loaded(epoch, most_workers(options)), "input dataloader")


def one_epoch_with_most_workers(options: Options) -> Iterator[Case]:
    if not is_custom_model(options.model):
        batch_size = min(
            GPU_BATCH_SIZE if options.device == "cuda" else CPU_BATCH_SIZE, max(options.batch_sweep)
        )
        epoch = if_valid(
            size_id(options.device, 1, batch_size),
            partial(options.epoch, world_size=1, per_rank_batch_size=batch_size),
        )
        if isinstance(epoch, EpochSpec):
            epoch = without_torchvision(loaded(epoch, most_workers(options)), "input dataloader")
        yield epoch


def most_workers(options: Options) -> int:
    return 8 if options.device == "cuda" else 2


def loaded(epoch: EpochSpec, workers: int) -> EpochSpec:
    return dataclasses.replace(epoch, input="dataloader", loader_workers=workers)


@pytest.mark.specs(cases=epochs)
def test_batch_size(measure: Measure, spec: EpochSpec) -> None:
    """Epochs after the first, which starts the workers and warms up, or after some steps where those do."""
    epoch = measure(spec)
    training_metrics(measure, epoch)
    if spec.input != "fixed":
        share = loading_shares(epoch, measure.reference("without_loading", without_loading(spec)))
        measure.metric("loading_share", share)
        if median(share.values()) >= LEAST_SHARE:
            measure.warn("loading the images limits")


@pytest.mark.specs(cases=one_epoch_with_most_workers)
def test_loader_workers(measure: Measure, spec: EpochSpec) -> None:
    """From how many workers on does loading take less than 5 % of an epoch?"""
    epochs = {spec.loader_workers: measure(spec)}
    without = measure.reference("without_loading", without_loading(spec))
    for workers in WORKERS[: WORKERS.index(spec.loader_workers)]:
        epochs[workers] = measure.reference(f"workers={workers}", loaded(spec, workers))
    shares = {workers: loading_shares(epochs[workers], without) for workers in sorted(epochs)}
    for workers, share in shares.items():
        measure.metric(f"loading_share_with_{workers}_workers", share)
    enough = enough_workers({workers: median(share.values()) for workers, share in shares.items()})
    if enough is None:
        measure.warn(f"loading the images limits, with {spec.loader_workers} workers, too")
    else:
        measure.metric("enough_workers", {name: float(enough) for name in shares[enough]})


def fixed_batches(options: Options) -> Iterator[Case]:
    """A small one, to begin with."""
    if options.sides is not None:
        yield skipped(
            size_id(options.device, 1, SMALLEST),
            "the search has a GPU's whole memory for one process set; it is for runs of one side",
        )
    elif options.device == "cpu":
        yield skipped(
            size_id(options.device, 1, SMALLEST),
            "a CPU's memory ends where no step is worth its time; test_batch_size has the sizes given",
        )
    else:
        yield if_valid(
            size_id(options.device, 1, SMALLEST),
            partial(options.step, world_size=1, per_rank_batch_size=SMALLEST, input="fixed"),
        )


@pytest.mark.specs(cases=fixed_batches)
def test_largest_batch(measure: Measure, spec: TrainingSpec) -> None:
    """From a small batch four-fold until one does not fit, then in between, to a sixteenth."""
    fitting: dict[int, Measured] = {}
    reasons: list[str] = []

    def fits(batch_size: int) -> bool:
        found = measure.attempt(dataclasses.replace(spec, per_rank_batch_size=batch_size))
        if isinstance(found, str):
            reasons.append(f"a batch of {batch_size} does not fit: {found}")
            return False
        fitting[batch_size] = found
        return True

    largest = largest_that_fits(fits, spec.per_rank_batch_size)
    names = [sample.set for sample in measure(spec).samples]
    measure.metric("largest_batch_size", dict.fromkeys(names, float(largest)))
    for batch_size, step in sorted(fitting.items()):
        seconds = median(step.all_step_seconds())
        measure.metric(f"step_seconds_at_{batch_size}", dict.fromkeys(names, seconds))
        measure.metric(f"images_per_second_at_{batch_size}", dict.fromkeys(names, batch_size / seconds))
        if peaks := step.counter("peak_memory_bytes"):
            measure.metric(f"peak_memory_bytes_at_{batch_size}", dict.fromkeys(names, max(peaks.values())))
    for reason in reasons:
        measure.note(reason)


def without_loading(spec: EpochSpec) -> EpochSpec:
    return dataclasses.replace(spec, input="fixed", loader_workers=0)


def loading_shares(loaded: Measured, without: Measured) -> dict[str, float]:
    """By set, the share of an epoch that its loading takes."""
    alone = without.median_step_seconds()
    return {name: loading_share(t, alone[name]) for name, t in loaded.median_step_seconds().items()}
