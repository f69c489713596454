"""Device time, price, utilization and energy of epochs and whole trainings."""

from __future__ import annotations

import math
from collections.abc import Callable

from ddpperf.report.experiment_columns import WHOLE_TRAININGS
from ddpperf.report.questions.grid import EACH_CASE, Figure, Shape, figure
from ddpperf.report.questions.question import Question
from ddpperf.report.stored_cases import Case
from ddpperf.results import metrics, units

USED = (
    *("gpu_utilization", "gpu_memory_bytes", "power_watts", "temperature_celsius"),
    *("cpu_utilization", "rank_memory_bytes"),
)

Value = Callable[[Case], float | None]


def _costs(work: str, suffix: str) -> Shape:
    """Return the device time and the price of an epoch or of a training, and what more devices save.

    suffix: how the names of the metrics end.
    """

    def of(name: str) -> Value:
        return lambda case: case.value(f"{name}_seconds_{suffix}")

    device, saved, extra = of("device"), of("saved"), of("extra_device")

    def price(case: Case) -> float | None:
        found: float | None = case.header["options"].get("gpu_hour_price")
        return found

    def hours_per_hour(case: Case) -> float | None:
        gain, more = saved(case), extra(case)
        return None if gain is None or more is None or gain <= 0 else more / gain

    def column(
        heading: str, text: Callable[[float], str], *factors: Callable[[Case], float | None]
    ) -> Figure:
        def cell(case: Case) -> str:
            values = [factor(case) for factor in factors]
            return (
                text(math.prod(value for value in values if value is not None)) if None not in values else ""
            )

        return Figure(heading=heading, text=cell)

    def per_hour(seconds: float) -> str:
        return units.money(seconds / 3600)

    return Shape(
        rows=EACH_CASE,
        groups=(),
        figures=(
            column(f"device-minutes per {work}", lambda seconds: f"{seconds / 60:.4f}", device),
            column("time saved", units.seconds, saved),
            column("extra device time", units.seconds, extra),
            column("extra device-hours per saved hour", "{:.3f}".format, hours_per_hour),
            column("price", per_hour, price, device),
            column("extra price", per_hour, price, extra),
            column("price of a saved hour", units.money, price, hours_per_hour),
        ),
    )


EPOCH_COST = Question(
    title="Cost",
    tests=("test_step_breakdown", "test_epoch_scaling"),
    file="test_step_breakdown.py",
    needs=("device_seconds_per_epoch",),
    grid=_costs("epoch", "per_epoch"),
)
TRAINING_COST = Question(
    title="Cost of a whole training",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py",
    needs=("device_seconds_of_training",),
    grid=_costs("training", "of_training"),
)


def _used(quantity: str) -> Figure:
    """Return the column of the mean and the peak of a quantity."""
    metric = metrics.find(f"{quantity}_mean")

    def text(case: Case) -> str:
        mean, peak = (case.value(f"{quantity}_{end}") for end in ("mean", "peak"))
        return "" if mean is None or peak is None else f"{metric.format(mean)} / {metric.format(peak)}"

    return Figure(heading=metric.heading, text=text)


USAGE = Question(
    title="Utilization and energy",
    tests=(*WHOLE_TRAININGS, "test_batch_size", "test_epoch_scaling"),
    file="test_large_batch.py",
    needs=("cpu_utilization_mean",),
    grid=Shape(
        rows=EACH_CASE,
        groups=(),
        figures=(
            *map(_used, USED),
            *map(figure, ("joules_per_epoch", "joules_per_step", "images_per_joule")),
        ),
    ),
)
