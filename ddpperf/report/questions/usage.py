"""Utilization and energy."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.cases import Case
from ddpperf.report.experiments import WHOLE_TRAININGS
from ddpperf.report.questions.question import (
    Cells,
    Form,
    Question,
    extreme,
    metric_cells,
    row_per_case,
)
from ddpperf.results import units


def _used(case: Case) -> Cells:
    quantities: dict[str, tuple[str, Form]] = {
        "GPU": ("gpu_utilization", units.percent),
        "GPU memory": ("gpu_memory_bytes", units.nbytes),
        "power": ("power_watts", units.watts),
        "temperature": ("temperature_celsius", units.celsius),
        "CPU cores": ("cpu_utilization", units.percent),
        "memory of a rank": ("rank_memory_bytes", units.nbytes),
    }
    mean, peak = (
        metric_cells(case, {heading: (f"{name}_{end}", form) for heading, (name, form) in quantities.items()})
        for end in ("mean", "peak")
    )
    cells = {heading: f"{mean[heading]} / {peak[heading]}" for heading in mean}
    return cells | metric_cells(
        case,
        {
            "energy per epoch": ("joules_per_epoch", units.joules),
            "energy per step": ("joules_per_step", units.joules),
            "images/J": ("images_per_joule", "{:.3g}".format),
        },
    )


def _about_usage(cases: Sequence[Case]) -> str:
    sentences = ["A cell with two figures has the mean and the peak."]
    if any("gpu_utilization_mean" in case.metrics for case in cases):
        sentences.append("The driver averages a GPU's utilization over 1/6 s to 1 s.")
    if any("images_per_joule" in case.metrics for case in cases):
        most, case = extreme(cases, "images_per_joule", most=True)
        sentences.append(f"The most images per joule are {most:.3g} ({case.described()}).")
    else:
        sentences.append(
            "No energy is known: no energy counter could be read, or the rounds were too short for it."
        )
    return " ".join(sentences)


USAGE = Question(
    title="Utilization and energy",
    tests=(*WHOLE_TRAININGS, "test_batch_size", "test_epoch_scaling"),
    file="test_large_batch.py",
    needs=("cpu_utilization_mean",),
    rows=row_per_case(_used),
    sentence=_about_usage,
)
