"""The speedups that Amdahl's and Gustafson's laws predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    Law,
    amdahl_speedup,
    gustafson_speedup,
    not_predictable,
    predicted_speedup,
)
from ddpperf.analysis.statistics import Estimate
from ddpperf.report.questions.grid import NOTHING, Entry, Shape, properties_of
from ddpperf.report.questions.question import Question
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


def _predictions(case: Case) -> Iterator[Entry]:
    """Yield the measured and the predicted speedup for each number of devices."""
    fraction = f"a serial fraction of {_estimate(_fitted(case), units.percent)}"
    properties = properties_of(case) | {"kind": "", "law": case.experiment.title, "fraction": fraction}
    devices = "GPUs" if "GPUs" in properties else "ranks"
    measured = measured_speedups(case)
    for N in sorted({*measured, *PREDICTED_DEVICES}):
        predicted = predicted_by(case, N)
        error = predicted.value / measured[N] - 1 if predicted and N in measured else None
        figures = {
            "measured speedup": units.factor(measured[N]) if N in measured else "",
            "predicted speedup": _estimate(predicted, units.factor),
            "error": "" if error is None else units.change(error),
            "predicted efficiency": _estimate(predicted, units.percent, 1 / N),
        }
        yield Entry(case=case, properties=properties | {devices: str(N)}, figures=figures)


def _about_laws(cases: Sequence[Case]) -> str:
    """Return why a law predicts nothing."""
    return " ".join(
        f"{case.experiment.title}, {case.described()}: {reason}, so nothing is predicted."
        for case in cases
        if (reason := not_predictable(_fitted(case).value))
    )


LAWS = Question(
    title="Laws of scaling",
    tests=("test_amdahl", "test_gustafson"),
    file="test_scaling.py --world-sizes 1,2,4",
    needs=("serial_fraction",),
    grid=Shape(entries=_predictions),
    sentence=_about_laws,
)
