"""Arithmetic on values by process set, and the process sets of base and candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ddpperf.results.samples import BASE, CANDIDATE, Measured

SIDES = {BASE: ", base", CANDIDATE: ", candidate"}
Value = TypeVar("Value")


def per_set(function: Callable[..., Value], *by_set: Mapping[str, Any]) -> dict[str, Value]:
    """Return the function's result for each process set; by_set are its arguments."""
    first, *others = by_set
    return {name: function(value, *(other[name] for other in others)) for name, value in first.items()}


def by_rank(measured: Measured) -> dict[str, list[float]]:
    """Return the step time, in seconds, on each rank of each process set."""
    return {sample.set: measured.rank_step_seconds(sample) for sample in measured.samples}


def sets_by_side(measured: Measured) -> dict[str, list[str]]:
    """Return the names of the process sets by side. A key is the end of a sentence about that side.

    The end is ", base" or ", candidate", and empty if there is only one side. Sets of two sides may
    not be summed up together.
    """
    sides: dict[str, list[str]] = {}
    for sample in measured.samples:
        sides.setdefault(sample.side, []).append(sample.set)
    return {SIDES[side] if len(sides) > 1 else "": names for side, names in sides.items()}
