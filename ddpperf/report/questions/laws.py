"""The speedups that Amdahl's and Gustafson's laws predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    Law,
    amdahl_speedup,
    gustafson_speedup,
    not_predictable,
    predicted_speedup,
)
from ddpperf.analysis.statistics import Estimate
from ddpperf.report.questions.question import NOTHING, Cells, Question
from ddpperf.report.questions.speedup import by_training
from ddpperf.report.stored_cases import Case
from ddpperf.results import units

SPEEDUP_BY: Mapping[str, Law] = {"Amdahl's law": amdahl_speedup, "Gustafson's law": gustafson_speedup}


def _fitted(case: Case) -> Estimate:
    """Return the serial fraction of a law; the bounds are infinite if they are not known."""
    low, high = case.interval("serial_fraction") or (-math.inf, math.inf)
    return Estimate(value=case.value("serial_fraction") or 0.0, low=low, high=high)


def predicted_by(case: Case, N: float) -> Estimate | None:
    """Return the speedup that a law predicts for N devices; None if the law predicts nothing."""
    fraction = _fitted(case)
    if not_predictable(fraction.value):
        return None
    return predicted_speedup(SPEEDUP_BY[case.experiment.title], fraction, N)


def _estimate(found: Estimate | None, form: Callable[[float], str], scale: float = 1.0) -> str:
    """Return a value with its 95% interval as text."""
    if found is None:
        return NOTHING
    known = math.isfinite(found.low) and math.isfinite(found.high)
    interval = f"{form(scale * found.low)} to {form(scale * found.high)}" if known else "interval not known"
    return f"{form(scale * found.value)} ({interval})"


def measured_speedups(case: Case) -> dict[int, float]:
    """Return the measured speedups of a law's test by the number of devices."""
    name = "speedup_of_"
    measured = {key.removeprefix(name): found["value"] for key, found in case.metrics.items() if name in key}
    return {int(N): speedup for N, speedup in sorted(measured.items()) if N.isdecimal()}


def _law_rows(cases: Sequence[Case]) -> list[Cells]:
    rows: list[Cells] = []
    for training, found in by_training(cases).items():
        for case in found:
            measured = measured_speedups(case)
            for N in sorted({*measured, *PREDICTED_DEVICES}):
                predicted = predicted_by(case, N)
                error = predicted.value / measured[N] - 1 if predicted and N in measured else None
                row = {
                    "training": training,
                    "serial fraction": _estimate(_fitted(case), units.percent),
                    "devices": str(N),
                    "measured speedup": units.factor(measured[N]) if N in measured else "not measured",
                    "predicted speedup": _estimate(predicted, units.factor),
                    "error": NOTHING if error is None else units.change(error),
                    "predicted efficiency": _estimate(predicted, units.percent, 1 / N),
                }
                rows.append(row)
    return rows


def _about_laws(cases: Sequence[Case]) -> str:
    """Return why a law predicts nothing, and the warnings about its measurements."""
    reasons = [
        f"{training}: {reason}, so nothing is predicted."
        for training, (case, *_) in by_training(cases).items()
        if (reason := not_predictable(_fitted(case).value))
    ]
    warnings = dict.fromkeys(warning for case in cases for warning in case.warnings)
    return " ".join([*reasons, *(f"Warning: {warning}." for warning in warnings)])


LAWS = Question(
    title="Laws of scaling",
    tests=("test_amdahl", "test_gustafson"),
    file="test_scaling.py --world-sizes 1,2,4",
    needs=("serial_fraction",),
    rows=_law_rows,
    sentence=_about_laws,
)
