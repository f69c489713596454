"""The estimates of metrics in an A/B run, one from each process set."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ddpperf.results import metrics as registry
from ddpperf.results.metrics import Better, Gate, Metric
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import Spec, TrainingSpec
from ddpperf.specs.collective import Call
from ddpperf.verdict.judged_work import is_informational, is_launch_bound

Control = Literal["negative", "positive"]


@dataclass(frozen=True, kw_only=True)
class MetricEstimates:
    """The estimates of one metric of one test, one from each process set of base and candidate.

    Metrics with the same `noise_class` vary alike. `gated` says whether a worse value fails the
    run. `primary` says whether this metric represents its test. `control` marks a control
    measurement: a negative control must be found unchanged, a positive control slower. `tolerance`
    is the log ratio that counts as unchanged; None if the metric's settings say it.
    """

    test: str
    metric: str
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    noise_class: Hashable
    gated: bool = False
    primary: bool = False
    control: Control | None = None
    tolerance: float | None = None

    @property
    def definition(self) -> Metric:
        return registry.find(self.metric)

    @property
    def sign(self) -> int:
        """1 if a greater value of this metric is worse, else -1."""
        return -1 if self.definition.better is Better.HIGHER else 1

    @property
    def missing(self) -> str:
        """The reason why this metric cannot be judged, or an empty string if it can be judged."""
        base, candidate = len(self.base), len(self.candidate)
        if base != candidate or base < 2:
            found = f"{self.metric} of {base} base and {candidate} candidate process sets"
            return f"has {found}; both need the same number, at least 2"
        values = self.base + self.candidate
        valid = all(0 <= value < math.inf for value in values) and (self.definition.exact or all(values))
        return "" if valid else f"has a {self.metric} that is no positive number"


def estimates_of(
    test: str, measured: Measured, metrics: Mapping[str, Mapping[str, Any]], device: str
) -> list[MetricEstimates]:
    """Return the estimates of each metric that can get worse in an A/B run.

    The list is empty unless both base and candidate were measured. `metrics` maps each metric's
    name to its stored JSON.
    """
    base, candidate = (
        [sample.set for sample in measured.samples if sample.side == side] for side in (BASE, CANDIDATE)
    )
    if not base or not candidate:
        return []
    sides = [measured.of(side) for side in (BASE, CANDIDATE)]
    captured = [side.spec.captured for side in sides]
    launch_bound = all(map(is_launch_bound, sides)) and not any(captured)
    informational = is_informational(measured.spec, device)
    gates = {Gate.ALWAYS, Gate.LAUNCH_BOUND if launch_bound else Gate.UNLESS_LAUNCH_BOUND}
    values: dict[str, Mapping[str, float]] = {
        "time": measured.median_step_seconds(),
        "tail_seconds": {  # it shows stalls that the median hides
            sample.set: float(np.quantile(measured.step_seconds(sample), 0.9)) for sample in measured.samples
        },
    }
    values |= {name: metric["by_set"] for name, metric in metrics.items() if registry.find(name).better}
    if peak := measured.counter("peak_memory_bytes"):
        values.setdefault("peak_memory_bytes", peak)
    if launch_bound:  # without CPU seconds the metric becomes missing
        values.setdefault("cpu_seconds", measured.counter("cpu_seconds"))
    return [
        MetricEstimates(
            test=test,
            metric=name,
            base=tuple(by_set[process_set] for process_set in base if process_set in by_set),
            candidate=tuple(by_set[process_set] for process_set in candidate if process_set in by_set),
            noise_class=(_kind(measured.spec, device), *captured, launch_bound, informational),
            gated=registry.find(name).exact or (registry.find(name).gate in gates and not informational),
            primary=name == ("cpu_seconds" if launch_bound else "time"),
        )
        for name, by_set in values.items()
    ]


def _kind(spec: Spec, device: str) -> str:
    """Return the noise class of a spec: the kind of work whose times vary alike.

    On a CPU, other programs make times vary. So steps, epochs and whole trainings vary alike, and so
    do all collectives. Few tests measure an epoch or a whole training. The noise of so few tests is
    not known well enough for a class of its own.
    """
    if device == "cpu" and isinstance(spec, TrainingSpec):
        return "training"
    if device == "cpu" and isinstance(spec, Call):
        return "call"
    return spec.measurement
