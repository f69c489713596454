"""A `measure` fixture of canned samples, for tests of what an experiment derives from its times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from ddpperf.machine.hardware import Machine
from ddpperf.results.samples import Measured, Sample


def measuring(machine: Machine | None = None, pool: Any = None) -> Any:
    """Return the second argument of a `Measure` whose measurements get no warnings."""
    fields: dict[str, Any] = {"machine": machine or Machine(), "pool": pool, "sides": None, "side": "A"}
    fields |= {"whole": (), "known": (), "model": "", "refused": {}}
    return SimpleNamespace(**fields, notes=lambda *_: [])


class FakeMeasure:
    """Keeps the specs, references, metrics, notes and warnings of an experiment.

    samples_of: returns the samples of a spec. metrics: the values by process set, by metric.
    """

    def __init__(
        self, samples_of: Callable[[Any], Iterable[Sample]] = lambda spec: (), machine: Machine | None = None
    ) -> None:
        self.machine = machine or Machine()
        self.specs: list[Any] = []
        self.references: dict[str, Any] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.note, self.warn = self.notes.append, self.warnings.append
        self._samples_of = samples_of

    def __call__(self, spec: Any) -> Measured:
        self.specs.append(spec)
        return Measured(spec=spec, iterations=1, samples=tuple(self._samples_of(spec)))

    def reference(self, name: str, spec: Any) -> Measured:
        self.references[name] = spec
        return self(spec)

    def metric(self, name: str, by_set: Mapping[str, Any]) -> None:
        self.metrics[name] = dict(by_set)
