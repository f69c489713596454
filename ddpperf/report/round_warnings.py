"""Warnings about the quality of a stored test's measurement."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from ddpperf.analysis.statistics import (
    FEWEST_ROUNDS,
    drift,
    median_and_error,
    relative_iqr,
    spread_over_ranks,
)
from ddpperf.results.outcomes import NoteKind
from ddpperf.results.samples import SLOW_PACE, Measured

NOISY_IQR = 0.25
ONE_DEVICE = "one_device"  # the reference measurement of the single-device step time
UNEQUAL_DEVICES = 0.10  # equal devices that do the same work alone differ by 1%


def warnings_of(stored: dict[str, Any]) -> list[str]:
    """Return all warnings about a stored test.

    Some were stored by the run; others are computed here from the stored rounds.
    """
    measured = Measured.from_json(stored)
    references = {name: Measured.from_json(reference) for name, reference in stored["references"].items()}
    warnings = [note["text"] for note in stored["notes"] if note["kind"] == NoteKind.WARNING]
    warnings += _round_warnings(measured, "the")
    for name, reference in references.items():
        warnings += _round_warnings(reference, f"{name}'s")
    noisy = ["the rounds"] * _is_noisy(measured)
    noisy += ["the rounds of reference measurements"] * any(map(_is_noisy, references.values()))
    warnings += [f"{rounds} spread by more than {NOISY_IQR:.0%} (IQR)" for rounds in noisy]
    if ONE_DEVICE in references:
        spreads = [spread_over_ranks(sample.seconds) or 0.0 for sample in references[ONE_DEVICE].samples]
        if max(spreads) > UNEQUAL_DEVICES:
            differs = f"t(1) of the devices differs by more than {UNEQUAL_DEVICES:.0%}"
            warnings.append(f"{differs}; the slowest device's t(1) is used")
    return list(dict.fromkeys(warnings))


def spread(measured: Measured) -> float | None:
    """Return the interquartile range of the rounds over their median, in the median process set.

    Returns None for too few rounds, and for a measurement that counts instead of timing.
    """
    rounds = _rounds(measured)
    if measured.spec.counts or min(map(len, rounds)) < FEWEST_ROUNDS:
        return None
    return median(map(relative_iqr, rounds))


def relative_error(measured: Measured) -> float:
    """Return the standard error of the median time over rounds, as a fraction; infinity for few rounds."""
    if spread(measured) is None:
        return math.inf
    errors = [error / middle for middle, error in map(median_and_error, _rounds(measured))]
    return median(errors) / math.sqrt(len(errors))


def _rounds(measured: Measured) -> list[list[float]]:
    return [measured.step_seconds(sample) for sample in measured.samples]


def _is_noisy(measured: Measured) -> bool:
    return (spread(measured) or 0.0) > NOISY_IQR


def _round_warnings(measured: Measured, whose: str) -> list[str]:
    if measured.spec.counts:
        return []
    if spread(measured) is None:
        return [f"fewer than {FEWEST_ROUNDS} rounds, so their spread is unknown"]
    warnings = []
    if drifts := [change for seconds in _rounds(measured) if (change := drift(seconds)) is not None]:
        warnings.append(f"{whose} rounds drift by {max(drifts, key=abs):+.0%} from the first to the last")
    if (slowdown := max(measured.counter("graph_slowdown").values(), default=1.0)) > SLOW_PACE:
        slower = f"a small kernel took {slowdown:.2f} times as long"
        warnings.append(f"{whose} CUDA graphs were replayed at the GPU's slower pace: {slower}")
    return warnings
