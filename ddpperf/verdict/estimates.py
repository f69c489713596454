"""From a test's measurement of two sides to readings: each metric's values by side, and how it varies."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Literal

from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import OWN_ALGORITHMS, AllReduceSpec
from ddpperf.verdict.settings import HIGHER_IS_BETTER, LOWER_IS_BETTER
from ddpperf.verdict.stored_run import is_launch_bound

MESSAGES = ("gradients", "buffers", "parameters", "metrics", "control")
EXACT = (
    "communicated_bytes_per_epoch",
    *(f"{kind}_bytes" for kind in MESSAGES),
)  # which code alone decides: any more is worse
GATED = ("time", "tail_seconds", "speedup", "peak_memory_bytes")
GATED_BY_CPU = (
    "cpu_seconds",
    "peak_memory_bytes",
)  # where launches bind the step, whose time then says little
SMALL_BYTES = 2**24  # an all_reduce of fewer bytes, called eagerly, is bound by launches on a GPU
TAIL = 9  # tenths of a set's rounds that are faster than its tail

Control = Literal["negative", "positive"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One metric of one test: each set's value, by side, of equally many sets.

    kind: of noise, shared by what varies alike. gated: whether it can fail the run. primary: the one that a test stands for.
    control: of the decision itself, which it must call unchanged, or must suspect.
    """

    test: str
    metric: str
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    kind: Hashable
    gated: bool = False
    primary: bool = False
    control: Control | None = None

    @property
    def sign(self) -> int:
        """Of a change for the worse."""
        return -1 if self.metric in HIGHER_IS_BETTER or self.metric.startswith("speedup_over_") else 1

    @property
    def missing(self) -> str:
        """Why nothing can be said of it; empty if something can."""
        if len(self.base) != len(self.candidate) or len(self.base) < 2:
            return f"has {self.metric} of {len(self.base)} and {len(self.candidate)} sets; equally many are needed, 2 or more"
        if self.metric in EXACT and all(0 <= value < math.inf for value in self.base + self.candidate):
            return ""
        if not all(0 < value < math.inf for value in self.base + self.candidate):
            return f"has a {self.metric} that is no positive number"
        return ""


def readings_of(
    test: str, measured: Measured, metrics: Mapping[str, Mapping[str, Any]], device: str
) -> list[Reading]:
    """All metrics of a test that are better when they are greater, or when they are less; empty of a run with one side."""
    sets = {
        side: [sample.set for sample in measured.samples if sample.side == side] for side in (BASE, CANDIDATE)
    }
    if not all(sets.values()):
        return []
    sides = [measured.of(side) for side in (BASE, CANDIDATE)]
    by_cpu = all(is_launch_bound(side) and not side.spec.captured for side in sides)
    small = device == "cuda" and isinstance(measured.spec, AllReduceSpec) and _launches_bind(measured.spec)
    primary = "cpu_seconds" if by_cpu else "time"
    gated = GATED_BY_CPU if by_cpu else () if small else GATED
    values: dict[str, Mapping[str, float]] = {
        "time": measured.median_step_seconds(),
        "tail_seconds": {sample.set: _tail(measured.step_seconds(sample)) for sample in measured.samples},
    }
    values |= {name: metric["by_set"] for name, metric in metrics.items() if _is_directed(name)}
    if by_cpu:
        values.setdefault("cpu_seconds", measured.counter("cpu_seconds"))  # none is a hole
    kind = (measured.spec.measurement, *(side.spec.captured for side in sides), by_cpu, small)
    return [
        Reading(
            test=test,
            metric=name,
            base=tuple(by_set[each] for each in sets[BASE] if each in by_set),
            candidate=tuple(by_set[each] for each in sets[CANDIDATE] if each in by_set),
            kind=kind,
            gated=name in gated or name in EXACT,
            primary=name == primary,
        )
        for name, by_set in values.items()
    ]


def _launches_bind(call: AllReduceSpec) -> bool:
    return not call.captured and (call.nbytes < SMALL_BYTES or call.algorithm in OWN_ALGORITHMS)


def _is_directed(metric: str) -> bool:
    return metric in HIGHER_IS_BETTER + LOWER_IS_BETTER + EXACT or metric.startswith("speedup_over_")


def _tail(seconds: Sequence[float]) -> float:
    """The ninth decile of a set's rounds: a median does not see a stall that comes now and then."""
    return quantiles(seconds, n=10, method="inclusive")[TAIL - 1] if len(seconds) > 1 else seconds[0]
