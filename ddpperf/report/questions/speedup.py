"""Time and speedup of steps and their parts, and when one device is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddpperf.analysis.scaling import strong_speedup, weak_speedup
from ddpperf.report.questions.grid import (
    EACH_CASE,
    Entry,
    Figure,
    Shape,
    figure,
    properties_of,
    time_of,
)
from ddpperf.report.questions.question import Question, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.specs import PARTS

# More devices are worth it up to such an efficiency; one at 50% takes twice the device time of one device.
EFFICIENCY_LIMITS = (0.8, 0.5)


BATCH_SIZE = Question(
    title="Q1: time per epoch by batch size",
    tests=("test_batch_size",),
    file="test_batch_size.py",
    needs=("images_per_second",),
    grid=Shape(
        rows=("batch",),
        groups=("input",),
        figures=(time_of("epoch"), figure("loading_fraction"), figure("images_per_second")),
    ),
)


def _scaling(kind: str) -> Question:
    return Question(
        title=f"Q2: time and speedup by batch size and devices, {kind} scaling",
        tests=(f"test_{kind}_scaling",),
        file=f"test_scaling.py -k {kind}_scaling",
        needs=("images_per_second",),
        grid=Shape(figures=(time_of("step"), figure("epoch_seconds"), figure("speedup"))),
    )


WEAK_SCALING, STRONG_SCALING = _scaling("weak"), _scaling("strong")


def _extra_device_time(case: Case) -> str:
    efficiency = case.value("efficiency")
    return units.change(1 / efficiency - 1) if efficiency else ""


def _about_enough(cases: Sequence[Case]) -> str:
    """Count the trainings that keep an efficiency on the most devices, and those that get slower."""
    most = [case for case in cases if training_of(case).world_size == _most(cases)]
    efficiencies = [case.value("efficiency") or 0.0 for case in most]
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    kept = [(limit, sum(value >= limit for value in efficiencies)) for limit in EFFICIENCY_LIMITS]
    reached = ", ".join(f"{count} have an efficiency of {limit:.0%} or more" for limit, count in kept)
    slower = sum((case.value("speedup") or 1.0) < 1 for case in most)
    trainings = units.counted(len(most), "training")
    return (
        f"Of {trainings} on {_most(cases)} {devices}, {reached}, and {slower} take longer than on one device."
    )


def _most(cases: Sequence[Case]) -> int:
    return max(training_of(case).world_size for case in cases)


ONE_DEVICE_ENOUGH = Question(
    title="When is one device enough?",
    tests=("test_weak_scaling", "test_strong_scaling", "test_epoch_scaling"),
    file="test_scaling.py",
    needs=("efficiency",),
    grid=Shape(figures=(figure("efficiency"), Figure(heading="extra time", text=_extra_device_time))),
    sentence=_about_enough,
)


def _parts(case: Case) -> dict[str, float]:
    """Return the seconds of each part of a step, the rest, and the whole step, which is their sum."""
    step = case.value("step_seconds") or case.seconds
    found = {part: case.value(f"{part}_seconds") for part in PARTS}
    parts = {part: seconds for part, seconds in found.items() if seconds is not None}
    return parts | {"other": step - math.fsum(parts.values()), "step": step}


def _parts_shape(whole: str) -> Shape:
    """Return the columns of the parts of a step or of an epoch."""

    def column(part: str) -> Figure:
        def text(case: Case) -> str:
            steps = training_of(case).steps_per_epoch if whole == "epoch" else 1
            seconds = _parts(case).get(part)
            return "" if seconds is None else units.seconds(steps * seconds)

        return Figure(heading=whole if part == "step" else part.replace("_", " "), text=text)

    return Shape(rows=EACH_CASE, groups=(), figures=tuple(map(column, (*PARTS, "other", "step"))))


STEP_PARTS, EPOCH_PARTS = (
    Question(
        title=f"Parts of {whole}",
        tests=("test_step_breakdown", "test_epoch_breakdown"),
        file="test_step_breakdown.py",
        needs=("forward_seconds",),
        grid=_parts_shape(whole.split()[1]),
    )
    for whole in ("a step", "an epoch")
)


def _part_speedups(case: Case) -> Iterator[Entry]:
    """Yield the seconds of each part of a step alone and on N devices, with its speedup, and of all parts."""
    law = weak_speedup if case.experiment.kind == "weak" else strong_speedup
    alone, together = 0.0, 0.0
    for part in PARTS:
        one, many = case.value(f"{part}_seconds_on_one_device"), case.value(f"{part}_seconds")
        if one or many:
            yield _part_entry(case, part, one, many, case.value(f"{part}_speedup"))
        alone, together = alone + (one or 0.0), together + (many or 0.0)
    yield _part_entry(case, "all parts", alone, together, law(alone, together, training_of(case).world_size))


def _part_entry(case: Case, part: str, one: float | None, many: float | None, speedup: float | None) -> Entry:
    texts = (
        ("alone", one, units.seconds),
        ("together", many, units.seconds),
        ("speedup", speedup, units.factor),
    )
    figures = {heading: "" if value is None else text(value) for heading, value, text in texts}
    properties = properties_of(case) | {"part": part.replace("_", " ")}
    devices = "GPUs" if "GPUs" in properties else "ranks"
    properties |= {devices: "", "together": f"{properties[devices]} {devices}"}
    return Entry(case=case, properties=properties, figures=figures)


PARTS_SPEEDUP = Question(
    title="Speedup of the parts of a step",
    tests=("test_weak_parts_speedup", "test_strong_parts_speedup"),
    file="test_step_breakdown.py",
    needs=("forward_speedup",),
    grid=Shape(rows=("part",), groups=("input", "together"), entries=_part_speedups),
)
