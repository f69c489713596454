"""The parts of a training step, and their speedup."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.analysis.scaling import strong_speedup, weak_speedup
from ddpperf.report.questions.question import NOTHING, Cells, Question, training_of
from ddpperf.report.questions.speedup import by_training
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.specs import PARTS


def _step(case: Case) -> Cells:
    return {"step": units.seconds(case.value("step_seconds") or case.seconds)}


STEP_PARTS = Question(
    title="Parts of a step",
    tests=("test_step_breakdown", "test_epoch_breakdown"),
    file="test_step_breakdown.py",
    needs=("forward_seconds",),
    cells=_step,
    metrics=tuple(f"{part}_seconds" for part in PARTS),
)


def _speedups(cases: Sequence[Case]) -> list[Cells]:
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
    rows=_speedups,
)
