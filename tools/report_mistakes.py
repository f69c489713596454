"""Makes the tables of docs/reports.md: what common definitions give for the same stored measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ddpperf.report.questions.figures import training_of
from ddpperf.report.stored_cases import Case, cases_of, of_functions
from ddpperf.results import units
from ddpperf.results.stored_runs import read_document
from tools.markdown_tables import ROOT, markdown
from tools.plain_timing import PARTS, WAYS

BATCH = 128  # the batch size of the tables that show one batch size
CAPTURED = {"execution": "graph", "model": "resnet18_cifar", "strategy": "ddp"}


# --- speedup


def speedups_table(run: str) -> str:
    """Return a Markdown table of the speedups that common formulas give for the same step times."""
    found = cases_of(read_document(ROOT / run))
    sizes = sorted({case.measured.spec.world_size for case in of_functions(found, "test_weak_scaling")} - {1})
    columns = [speedups(found, N) for N in sizes]
    rows = []
    for place, (formula, kept, name) in enumerate(SPEEDUPS):
        values, most = [column[place] for column in columns], columns[-1]
        against = (most[place] / most[0], most[place] / most[4])
        rows.append((formula, kept, *map(units.factor, values), name.format(*against)))
    return markdown(("formula", "constant", *(f"{N} GPUs" for N in sizes), "what it is"), rows)


# The formula, the constant batch size, and what the value is. {0} is the last value of the table over
# the weak-scaling speedup, {1} over the strong-scaling speedup.
SPEEDUPS = (
    ("N t(1) / t(N), times of a step", f"{BATCH} images per GPU", "weak-scaling speedup"),
    ("t(1) / t(N), times of a step", f"{BATCH} images per GPU", "efficiency, not a speedup"),
    ("T(1) / T(N), times of an epoch", f"{BATCH} images per GPU", "weak-scaling speedup, not strong scaling"),
    ("N T(1) / T(N), times of an epoch", f"{BATCH} images per GPU", "wrong: {0:.2f} times the speedup"),
    ("t(1) / t(N), times of a step", f"{BATCH} images of all GPUs", "strong-scaling speedup"),
    (
        "T(1) / T(N), called strong scaling",
        f"{BATCH} images per GPU",
        "wrong: {1:.2f} times the strong speedup",
    ),
)


def speedups(found: Sequence[Case], N: int) -> list[float]:
    """Return the value of each formula of SPEEDUPS on N devices."""
    weak = one(found, "test_weak_scaling", world_size=N, per_rank_batch_size=BATCH, **CAPTURED)
    strong = one(found, "test_strong_scaling", world_size=N, global_batch_size=BATCH, **CAPTURED)
    S, spec = weak.metrics["speedup"]["value"], training_of(weak)
    epochs = S / N * spec.one_device().steps_per_epoch / spec.steps_per_epoch
    return [S, S / N, epochs, N * epochs, strong.metrics["speedup"]["value"], epochs]


def one(found: Sequence[Case], test: str, **fields: Any) -> Case:
    """Return the only case of a test function whose spec has these fields."""
    (case,) = (
        case
        for case in of_functions(found, test)
        if all(getattr(case.measured.spec, name) == value for name, value in fields.items())
    )
    return case


# --- clocks


def clocks_table(result: str) -> str:
    """Return a Markdown table of the same steps, timed with and without waiting for the device.

    result: a file with the output of tools/plain_timing.py.
    """
    rows = []
    steps = json.loads((ROOT / result).read_text())["steps"]
    (step,) = (step for step in steps if step["batch_size"] == BATCH)
    for way in WAYS:
        parts = (units.seconds(step[way][part]) for part in (*PARTS, "step"))
        rows.append((way, *parts, f"{step[way]['step'] / step[WAYS[-1]]['step'] - 1:+.0%}"))
    return markdown(("the loop waits", *PARTS, "step", "error of the step"), rows)
