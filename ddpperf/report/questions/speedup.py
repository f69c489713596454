"""Time and speedup of steps and their parts, and when one device is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median

from ddpperf.analysis.scaling import strong_speedup, weak_speedup
from ddpperf.report.questions.question import NOTHING, Cells, Question, time_cell, training_of
from ddpperf.report.stored_cases import Case, in_words
from ddpperf.results import units
from ddpperf.specs import PARTS

# More devices are worth it up to such an efficiency; one at 50% takes twice the device time of one device.
EFFICIENCY_LIMITS = (0.8, 0.5)


def _epoch(case: Case) -> Cells:
    cells = time_cell(case)
    if without := case.references.get("without_loading"):
        cells["epoch without loading"] = units.seconds(median(without.median_step_seconds().values()))
    return cells


BATCH_SIZE = Question(
    title="Q1: time per epoch by batch size",
    tests=("test_batch_size",),
    file="test_batch_size.py",
    needs=("images_per_second",),
    cells=_epoch,
    metrics=("loading_fraction", "images_per_second"),
)


SCALING = Question(
    title="Q2: time and speedup by batch size and devices",
    tests=("test_weak_scaling", "test_strong_scaling"),
    file="test_scaling.py",
    needs=("images_per_second",),
    cells=lambda case: {"global batch": f"{training_of(case).global_batch_size:,}"} | time_cell(case),
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
    experiment, properties = case.experiment, case.properties | case.constant_batch
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


STEP_PARTS = Question(
    title="Parts of a step",
    tests=("test_step_breakdown", "test_epoch_breakdown"),
    file="test_step_breakdown.py",
    needs=("forward_seconds",),
    cells=lambda case: {"step": units.seconds(case.value("step_seconds") or case.seconds)},
    metrics=tuple(f"{part}_seconds" for part in PARTS),
)


def _part_speedups(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each step part of a training, with its time on one and on several devices."""
    sizes = sorted({training_of(case).world_size for case in cases})
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    headings = [f"1 {devices[:-1]}", *(f"{N} {devices}" for N in sizes), *(f"speedup on {N}" for N in sizes)]
    rows: list[Cells] = []
    for training, scaled in by_training(cases).items():
        by_size = {training_of(case).world_size: case for case in scaled}
        first, found = scaled[0], [by_size.get(N) for N in sizes]
        law = weak_speedup if first.experiment.kind == "weak" else strong_speedup
        sums = [0.0] * (1 + len(sizes))
        for part in PARTS:
            seconds = [first.value(f"{part}_seconds_on_one_device")]
            seconds += [case.value(f"{part}_seconds") if case else None for case in found]
            speedups = [case.value(f"{part}_speedup") if case else None for case in found]
            if any(seconds):
                cells = zip(headings, _part_cells(seconds, speedups), strict=True)
                rows.append({"training": training, "part": part.replace("_", " "), **dict(cells)})
            sums = [total + (value or 0.0) for total, value in zip(sums, seconds, strict=True)]
        t1, *many = sums
        whole = [law(t1, tN, N) if tN else None for N, tN in zip(sizes, many, strict=True)]
        cells = zip(headings, _part_cells([total or None for total in sums], whole), strict=True)
        rows.append({"training": training, "part": "all parts", **dict(cells)})
    return rows


def _part_cells(seconds: Sequence[float | None], speedups: Sequence[float | None]) -> list[str]:
    cells = [NOTHING if value is None else units.seconds(value) for value in seconds]
    return cells + [NOTHING if value is None else units.factor(value) for value in speedups]


PARTS_SPEEDUP = Question(
    title="Speedup of the parts of a step",
    tests=("test_weak_parts_speedup", "test_strong_parts_speedup"),
    file="test_step_breakdown.py",
    needs=("forward_speedup",),
    rows=_part_speedups,
)
