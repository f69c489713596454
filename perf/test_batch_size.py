"""Batch size: how long is an epoch with each batch size, and which batch size is the largest?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from ddpperf.analysis.batch_size import LEAST_FRACTION, enough_workers, largest_that_fits
from ddpperf.plugin.cases import Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, TrainingSpec, is_custom_model
from perf.common.by_set import per_set, sets_by_side
from perf.common.step_metrics import training_metrics
from perf.common.step_specs import step_case

CPU_BATCHES, GPU_BATCHES = (32, 128, 512), (32, 128, 512, 2048)  # images per step of the epochs
WORKERS = (0, 1, 2, 4, 8)
SMALLEST = 32  # the first batch size that the search for the largest one tries
CPU_BATCH_SIZE, GPU_BATCH_SIZE = 128, 512  # for test_loader_workers


def sweep(options: Options) -> tuple[int, ...]:
    """Return the numbers of images per step for the epochs on one device."""
    usual = GPU_BATCHES if options.device == "cuda" else CPU_BATCHES
    return options.batch_sizes if "--batch-sizes" in options.given else usual


def epochs(options: Options) -> Iterator[Case]:
    """Yield epochs to measure for each batch size and each of three ways to get the images.

    An epoch repeats one fixed batch, reads images that are already on the device, or uses a
    DataLoader. On a CPU only the smallest batch size reads images from the device.

    In the core suite, images are on the device. On a CPU it has the smallest batch size, and on one
    GPU all batch sizes. On several GPUs, each GPU trains these epochs in turn, and four batch sizes
    took 43 s on two H100s. So there it has only the largest of --batch-sizes, which
    test_epoch_scaling measures anyway.
    """
    batch_sizes, custom = sweep(options), is_custom_model(options.model)
    on_gpus = options.device == "cuda"
    one_gpu = on_gpus and max(options.world_sizes) == 1
    extreme = (max if on_gpus else min)(options.batch_sizes)
    for batch_size in batch_sizes:
        core = one_gpu or batch_size == extreme
        yield case(step_case(options, 1, batch_size, epoch=True, input="fixed"), core=core and custom)
        if not custom:
            if on_gpus or batch_size == min(batch_sizes):
                yield case(step_case(options, 1, batch_size, epoch=True, input="device"), core=core)
            yield loaded_epoch(options, batch_size)


def one_epoch_with_most_workers(options: Options) -> Iterator[Case]:
    """Yield the measurement spec of an epoch with the largest number of DataLoader workers.

    The test measures epochs with fewer workers as reference measurements.
    """
    if not is_custom_model(options.model):
        usual = GPU_BATCH_SIZE if options.device == "cuda" else CPU_BATCH_SIZE
        yield loaded_epoch(options, min(usual, max(sweep(options))))


def loaded_epoch(options: Options, batch_size: int) -> Case:
    """Return an epoch with a DataLoader, outside of the core suite."""
    loader: dict[str, Any] = {"input": "dataloader", "loader_workers": 8 if options.device == "cuda" else 2}
    return case(step_case(options, 1, batch_size, epoch=True, **loader), core=False)


@pytest.mark.specs(cases=epochs)
def test_batch_size(measure: Measure, spec: EpochSpec) -> None:
    """How long does an epoch after the first one take, and does loading the images limit it?"""
    epoch = measure(spec)
    training_metrics(measure, epoch)
    if spec.input != "fixed":
        fraction = loading_fractions(epoch, measure.reference("without_loading", without_loading(spec)))
        measure.metric("loading_fraction", fraction)
        for side, names in sets_by_side(epoch).items():
            if median(fraction[name] for name in names) >= LEAST_FRACTION:
                measure.warn(f"loading limits the epoch{side}")


@pytest.mark.specs(cases=one_epoch_with_most_workers)
def test_loader_workers(measure: Measure, spec: EpochSpec) -> None:
    """How many DataLoader workers are needed so that loading takes less than 5% of an epoch?"""
    epoch = measure(spec)
    without = measure.reference("without_loading", without_loading(spec))
    fractions = {}
    for workers in WORKERS[: WORKERS.index(spec.loader_workers)]:
        fewer = dataclasses.replace(spec, loader_workers=workers)
        fractions[workers] = loading_fractions(measure.reference(f"workers={workers}", fewer), without)
    fractions[spec.loader_workers] = loading_fractions(epoch, without)
    for workers, fraction in fractions.items():
        measure.metric(f"loading_fraction_with_{workers}_workers", fraction)
    enough: dict[str, float] = {}  # by process set
    for side, names in sets_by_side(epoch).items():
        medians = {N: median(fraction[name] for name in names) for N, fraction in fractions.items()}
        if (least := enough_workers(medians)) is not None:
            enough |= dict.fromkeys(names, float(least))
        else:
            measure.warn(f"loading limits the epoch even with {spec.loader_workers} workers{side}")
    if len(enough) == len(epoch.samples):
        measure.metric("enough_workers", enough)


def fixed_batches(options: Options) -> Iterator[Case]:
    """Yield the training spec with which the search for the largest batch size begins."""
    identity = f"{size_id(options, 1)}-b{SMALLEST}"
    if options.sides is not None:
        why = "the search needs a GPU's whole memory for one process set, which an A/B run does not have"
        yield skipped(identity, why)
    elif options.device == "cpu":
        yield skipped(identity, "a CPU step is too slow long before memory ends")
    else:
        yield case(step_case(options, 1, SMALLEST, input="fixed"), core=False)


@pytest.mark.specs(cases=fixed_batches)
def test_largest_batch(measure: Measure, spec: TrainingSpec) -> None:
    """What is the largest batch size that fits into the memory of one GPU?

    The search multiplies the batch size by four until it does not fit, and then bisects to within a
    sixteenth.
    """
    fitting: dict[int, Measured] = {}

    def fits(batch_size: int) -> bool:
        found = measure.attempt(dataclasses.replace(spec, per_rank_batch_size=batch_size))
        if isinstance(found, str):
            measure.note(f"a batch of {batch_size} does not fit: {found}")
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


def without_loading(spec: EpochSpec) -> EpochSpec:
    return dataclasses.replace(spec, input="fixed", loader_workers=0)


def loading_fractions(loaded: Measured, without: Measured) -> dict[str, float]:
    """Return the fraction of the epoch time that loading images takes, for each process set."""
    seconds = loaded.median_step_seconds(), without.median_step_seconds()
    return per_set(lambda with_loading, without: 1 - without / with_loading, *seconds)
