"""Device time, price, utilization and energy of epochs and whole trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpperf.report.questions.question import NOTHING, Cells, Question, extreme
from ddpperf.report.stored_cases import Case
from ddpperf.report.table_columns import WHOLE_TRAININGS
from ddpperf.results import metrics, units

USED = (
    *("gpu_utilization", "gpu_memory_bytes", "power_watts", "temperature_celsius"),
    *("cpu_utilization", "rank_memory_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The device time and the price of an epoch or of a whole training.

    of: "epoch" or "training". suffix: how the names of the metrics end.
    """

    of: str
    suffix: str

    def row(self, case: Case) -> Cells:
        """Return the costs of a case that has a device time."""
        device, saved, extra = self._seconds(case)
        cells = {f"device-minutes per {self.of}": f"{device / 60:.4f}"}
        if saved is not None and extra is not None:
            cells |= {"time saved": units.seconds(saved), "extra device time": units.seconds(extra)}
            cells["extra device-hours per saved hour"] = f"{extra / saved:.3f}" if saved > 0 else NOTHING
        if (price := case.hour_price) is not None:
            cells["price"] = units.money(price * device / 3600)
            if saved is not None and extra is not None:
                cells["extra price"] = units.money(price * extra / 3600)
                cells["price of a saved hour"] = units.money(price * extra / saved) if saved > 0 else NOTHING
        return cells

    def sentence(self, cases: Sequence[Case]) -> str:
        """Compare the training that saves most time with the same training on one device."""
        compared = [case for case in cases if self._seconds(case)[1] is not None]
        if not compared:
            return "One device was measured, so no time is saved."
        saved, case = extreme(compared, f"saved_seconds_{self.suffix}", most=True)
        extra = self._seconds(case)[2] or 0.0
        sentence = (
            f"With {case.described()}, {'an' if self.of == 'epoch' else 'a'} {self.of} is "
            f"{units.seconds(abs(saved))} {'shorter' if saved > 0 else 'longer'} and takes "
            f"{units.seconds(abs(extra))} {'more' if extra > 0 else 'less'} device time than on one device."
        )
        cells = self.row(case)
        if case.hour_price is not None:
            sentence += f" It costs {cells['price']}."
            sentence += f" A saved hour costs {cells['price of a saved hour']}." if saved > 0 else ""
        return sentence

    def _seconds(self, case: Case) -> tuple[float, float | None, float | None]:
        """Return the device time; the time saved and the extra device time are None on one device."""
        device = case.metrics[f"device_seconds_{self.suffix}"]["value"]
        saved, extra = (
            case.value(f"{name}_{self.suffix}") for name in ("saved_seconds", "extra_device_seconds")
        )
        return device, saved, extra


EPOCHS, TRAININGS = Costs(of="epoch", suffix="per_epoch"), Costs(of="training", suffix="of_training")

EPOCH_COST = Question(
    title="Cost",
    tests=("test_step_breakdown", "test_epoch_scaling"),
    file="test_step_breakdown.py",
    needs=("device_seconds_per_epoch",),
    cells=EPOCHS.row,
    sentence=EPOCHS.sentence,
)
TRAINING_COST = Question(
    title="Cost of a whole training",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py",
    needs=("device_seconds_of_training",),
    cells=TRAININGS.row,
    sentence=TRAININGS.sentence,
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
