"""Arithmetic on values by process set, and the process sets of base and candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ddpperf.results.samples import BASE, CANDIDATE, Measured

SIDES = {BASE: ", base", CANDIDATE: ", candidate"}
Value = TypeVar("Value")


def per_set(function: Callable[..., Value], *by_set: Mapping[str, Any]) -> dict[str, Value]:
    """Call a function with the values of each process set, and return the results by process set."""
    first, *others = by_set
    return {name: function(value, *(other[name] for other in others)) for name, value in first.items()}


def by_rank(measured: Measured) -> dict[str, list[float]]:
    """Return the step time, in seconds, on each rank of each process set."""
    return {sample.set: measured.rank_step_seconds(sample) for sample in measured.samples}


def sets_by_side(measured: Measured) -> dict[str, list[str]]:
    """Return the names of the process sets of each side of an A/B run.

    The keys are ", base" and ", candidate", to append to sentences. Outside of an A/B run, the only
    key is "". Values of base and candidate must not be averaged together.
    """
    sides: dict[str, list[str]] = {}
    for sample in measured.samples:
        sides.setdefault(sample.side, []).append(sample.set)
    return {SIDES[side] if len(sides) > 1 else "": names for side, names in sides.items()}
