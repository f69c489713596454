"""The sides of an A/B run, whose process sets may not be summed up together."""

from __future__ import annotations

from ddpperf.results.samples import BASE, CANDIDATE, Measured

SIDES = {BASE: "base", CANDIDATE: "candidate"}


def sets_by_side(measured: Measured) -> dict[str, list[str]]:
    """Return the names of the process sets of each side, by "base" and "candidate".

    If there is only one side, its name is empty.
    """
    sides: dict[str, list[str]] = {}
    for sample in measured.samples:
        sides.setdefault(sample.side, []).append(sample.set)
    return {SIDES[side] if len(sides) > 1 else "": names for side, names in sides.items()}
