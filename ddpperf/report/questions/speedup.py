"""Time and speedup by batch size and number of devices, and when one device is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median

from ddpperf.report.questions.question import NOTHING, Cells, Question, time_cell, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.report.table_columns import in_words
from ddpperf.results import units

# More devices are worth it up to such an efficiency; one at 50% takes twice the device time of one device.
EFFICIENCY_LIMITS = (0.8, 0.5)


def _epoch(case: Case) -> Cells:
    without = case.references.get("without_loading")
    cells = time_cell(case)
    if without is not None:
        alone = median(without.median_step_seconds().values())
        cells["epoch without loading"] = units.seconds(alone)
    return cells


BATCH_SIZE = Question(
    title="Q1: time per epoch by batch size",
    tests=("test_batch_size",),
    file="test_batch_size.py",
    needs=("images_per_second",),
    cells=_epoch,
    metrics=("loading_fraction", "images_per_second"),
)


def _scaled(case: Case) -> Cells:
    return {"global batch": f"{training_of(case).global_batch_size:,}"} | time_cell(case)


SCALING = Question(
    title="Q2: time and speedup by batch size and devices",
    tests=("test_weak_scaling", "test_strong_scaling"),
    file="test_scaling.py",
    needs=("images_per_second",),
    cells=_scaled,
    metrics=("epoch_seconds", "speedup", "efficiency"),
)


def by_training(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Group cases that differ only in the number of devices, by the description of their training."""
    fields = [_without_devices(case) for case in cases]
    names = dict.fromkeys(name for of_case in fields for name in of_case)
    varying = {name for name in names if len({of_case.get(name, "") for of_case in fields}) > 1}
    found: dict[str, list[Case]] = {}
    for case, of_case in zip(cases, fields, strict=True):
        words = [
            in_words(name, value)
            for name, value in of_case.items()
            if value and (name in varying or name in ("kind", "batch", "global batch"))
        ]
        found.setdefault(", ".join(words), []).append(case)
    return found


def _without_devices(case: Case) -> dict[str, str]:
    """Return the properties of a training that are the same on all numbers of devices."""
    experiment, properties = case.experiment, dict(case.properties)
    if experiment.kind == "strong":  # whose global batch is constant
        properties |= {"batch": "", "global batch": f"{training_of(case).global_batch_size:,}"}
    found = {"kind": f"{experiment.kind} scaling" if experiment.kind else experiment.title}
    found |= {name: properties.get(name, "") for name in ("batch", "global batch")}
    return found | {
        name: value for name, value in properties.items() if name not in ("GPUs", "ranks", "kind")
    }


def _efficiencies(cases: Sequence[Case]) -> dict[int, float]:
    """Return the parallel efficiency of a training by the number of devices; 1 for one device."""
    found = {training_of(case).world_size: case.value("efficiency") for case in cases}
    return {1: 1.0} | {N: value for N, value in sorted(found.items()) if value is not None}


def _worth(efficiencies: Mapping[int, float], limit: float) -> int:
    """Return the largest number of devices up to which all measured efficiencies reach a limit."""
    *_, worth = takewhile(lambda N: efficiencies[N] >= limit, efficiencies)  # that of one device is 1
    return worth


def _enough_rows(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each training: the cheapest number of devices, and the gain of more devices."""
    rows: list[Cells] = []
    for training, found in by_training(cases).items():
        efficiencies = _efficiencies(found)
        speedups = {N: N * value for N, value in efficiencies.items()}
        fastest = max(speedups, key=speedups.__getitem__)
        extra = [f"{1 / value - 1:+.0%} on {N}" for N, value in efficiencies.items() if N > 1]
        slower = [str(N) for N, speedup in speedups.items() if speedup < 1]
        rows.append(
            {
                "training": training,
                "measured devices": ", ".join(map(str, efficiencies)),
                "least device time on": str(max(efficiencies, key=efficiencies.__getitem__)),
                **{
                    f"efficiency of {limit:.0%} up to": str(_worth(efficiencies, limit))
                    for limit in EFFICIENCY_LIMITS
                },
                "extra device time": ", ".join(extra),
                "slower than one device": ", ".join(slower) or NOTHING,
                "fastest": f"{fastest} ({units.factor(speedups[fastest])})",
            }
        )
    return rows


ONE_DEVICE_ENOUGH = Question(
    title="When is one device enough?",
    tests=("test_weak_scaling", "test_strong_scaling", "test_epoch_scaling"),
    file="test_scaling.py",
    needs=("efficiency",),
    rows=_enough_rows,
)
