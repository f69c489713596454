"""The record of a test: what a run measured for it and stores, with warnings and explanations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import SCHEMA


class NoteKind(enum.StrEnum):
    """Whether a note on a measurement questions the result (warning) or explains it (info)."""

    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Note:
    """A warning or an explanation about a test's measurements."""

    kind: NoteKind
    text: str


def warning(text: str) -> Note:
    """Return a note that questions the result of a measurement."""
    return Note(NoteKind.WARNING, text)


def info(text: str) -> Note:
    """Return a note that explains the result of a measurement."""
    return Note(NoteKind.INFO, text)


class Record:
    """The stored results of one test: its samples, references, metrics and notes.

    measured: the measurement of the test's own spec; None before that measurement.
    references: the measurements of other specs that metrics need, by name.
    metrics: the metrics by name, as they are stored as JSON.
    notes: warnings and explanations.
    """

    def __init__(self) -> None:
        self.measured: Measured | None = None
        self.references: dict[str, Measured] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.notes: list[Note] = []

    def add_metric(self, name: str, unit: str, by_set: Mapping[str, float], side: str) -> None:
        """Add a metric. Its value is the median over the process sets of the base or of the candidate.

        Before the test's own spec was measured, the value is the median over all process sets.
        """
        value = median(self._of_side(by_set, side) or by_set.values())
        self.metrics[name] = {"value": value, "unit": unit, "by_set": dict(by_set)}

    def add_note(self, note: Note) -> None:
        """Add a note, unless the test has an equal note."""
        if note not in self.notes:
            self.notes.append(note)

    def values_of(self, side: str) -> dict[str, float]:
        """Return the values of the metrics of the base or of the candidate."""
        by_name = {name: self._of_side(metric["by_set"], side) for name, metric in self.metrics.items()}
        return {name: median(values) for name, values in by_name.items() if values}

    def _of_side(self, by_set: Mapping[str, float], side: str) -> list[float]:
        samples = self.measured.samples if self.measured is not None else ()
        sets = {sample.set for sample in samples if sample.side == side}
        return [value for name, value in by_set.items() if name in sets]

    def to_json(self) -> dict[str, Any]:
        """Return the record of a measured test as JSON."""
        assert self.measured is not None
        return {
            "schema": SCHEMA,
            **self.measured.to_json(),
            "references": {name: reference.to_json() for name, reference in self.references.items()},
            "metrics": self.metrics,
            "notes": [asdict(note) for note in self.notes],
        }
