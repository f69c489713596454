"""The energy and the utilization over time of a process set's devices during a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_POINTS = 600  # of a stored series; a longer one is averaged
DIGITS = 4  # significant digits of a stored value

Row = tuple[float | None, ...]  # the values of one device, or of one rank; None where one is missing


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The energy of a process set's devices in a measurement, and their utilization over time.

    joules: the energy of each GPU in one step, epoch or training; empty if it is unknown. seconds:
    the time of each point since the first round began. series: the values of each quantity, such as
    power_watts, as `series[quantity][device][point]`. A quantity of the ranks has a row for each
    rank, and a quantity of the whole machine has one row. mean, peak: of each quantity and device
    over all samples, before points were averaged.
    """

    joules: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    series: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    mean: Mapping[str, Row] = field(default_factory=dict)
    peak: Mapping[str, Row] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Usage:
        """Read what `asdict` made of a usage; raise an error for anything else."""
        return cls(
            joules=tuple(fields["joules"]),
            seconds=tuple(fields["seconds"]),
            series={name: tuple(map(tuple, rows)) for name, rows in fields["series"].items()},
            mean={name: tuple(values) for name, values in fields["mean"].items()},
            peak={name: tuple(values) for name, values in fields["peak"].items()},
        )


def averaged(values: Sequence[float | None], most: int = MOST_POINTS) -> Row:
    """Return at most `most` points: the rounded means of equally many neighbouring values.

    A mean ignores missing values. A point without any value is None.
    """
    size = -(-len(values) // most) or 1
    groups = (values[start : start + size] for start in range(0, len(values), size))
    return tuple(mean_of(group) for group in groups)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the rounded mean of the values that are known, or None if none is."""
    known = [value for value in values if value is not None]
    return rounded(sum(known) / len(known)) if known else None


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
