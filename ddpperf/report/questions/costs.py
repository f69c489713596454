"""Device time, price, utilization and energy of epochs and whole trainings."""

from __future__ import annotations

from functools import partial

from ddpperf.report.experiment_columns import WHOLE_TRAININGS
from ddpperf.report.questions.question import NOTHING, Cells, Question
from ddpperf.report.stored_cases import Case
from ddpperf.results import metrics, units

USED = (
    *("gpu_utilization", "gpu_memory_bytes", "power_watts", "temperature_celsius"),
    *("cpu_utilization", "rank_memory_bytes"),
)


def _costs(case: Case, work: str, suffix: str) -> Cells:
    """Return the device time and the price of an epoch or of a training, and what more devices save.

    suffix: how the names of the metrics end.
    """
    device = case.metrics[f"device_seconds_{suffix}"]["value"]
    saved, extra = (case.value(f"{name}_{suffix}") for name in ("saved_seconds", "extra_device_seconds"))
    price = case.header["options"].get("gpu_hour_price")
    cells = {f"device-minutes per {work}": f"{device / 60:.4f}"}
    if saved is not None and extra is not None:  # more than one device
        cells |= {"time saved": units.seconds(saved), "extra device time": units.seconds(extra)}
        cells["extra device-hours per saved hour"] = f"{extra / saved:.3f}" if saved > 0 else NOTHING
    if price is not None:
        cells["price"] = units.money(price * device / 3600)
        if saved is not None and extra is not None:
            cells["extra price"] = units.money(price * extra / 3600)
            cells["price of a saved hour"] = units.money(price * extra / saved) if saved > 0 else NOTHING
    return cells


EPOCH_COST = Question(
    title="Cost",
    tests=("test_step_breakdown", "test_epoch_scaling"),
    file="test_step_breakdown.py",
    needs=("device_seconds_per_epoch",),
    cells=partial(_costs, work="epoch", suffix="per_epoch"),
)
TRAINING_COST = Question(
    title="Cost of a whole training",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py",
    needs=("device_seconds_of_training",),
    cells=partial(_costs, work="training", suffix="of_training"),
)


def _used(case: Case) -> Cells:
    cells = {}
    for quantity in USED:
        mean, peak = (case.value(f"{quantity}_{end}") for end in ("mean", "peak"))
        if mean is not None and peak is not None:
            metric = metrics.find(f"{quantity}_mean")
            cells[metric.heading] = f"{metric.format(mean)} / {metric.format(peak)}"
    return cells


USAGE = Question(
    title="Utilization and energy",
    tests=(*WHOLE_TRAININGS, "test_batch_size", "test_epoch_scaling"),
    file="test_large_batch.py",
    needs=("cpu_utilization_mean",),
    cells=_used,
    metrics=("joules_per_epoch", "joules_per_step", "images_per_joule"),
)
