"""The decision between a run's two sides: after the tests two controls, then the suspects again on fresh process sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

from ddpperf.analysis.against import Decision
from ddpperf.analysis.compare import Comparison
from ddpperf.analysis.judgement import Confirmed, Judgement
from ddpperf.analysis.readings import Control, Reading, readings_of
from ddpperf.analysis.settings import DecisionSettings
from ddpperf.analysis.verdict import Answer
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.sides import Sides
from ddpperf.results import BASE, CANDIDATE, Measured
from ddpperf.specs import CopySpec, TrainingSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.rank_process import Side

COPY_BYTES = {"cpu": 2**20, "cuda": 2**28}  # on a CPU as much as its own cache holds
SLOW_DOWN = {"cpu": 0.25, "cuda": 0.05}  # of a step, that the positive control puts into the candidate's


class Gate:
    """What a run with two sides decides. confirms: only of the suspects of a comparison with a stored run, the base's."""

    def __init__(
        self, sides: Sides, settings: DecisionSettings, device: str, replicates: int | None, *, confirms: bool
    ) -> None:
        self.sides = sides
        self.confirms = confirms
        self.device = device
        self.settings = settings.with_sets(replicates) if replicates is not None else settings
        self.second_look: dict[str, Any] = {}
        self._decision: Decision | None = None
        self._problems: list[str] = []
        self._compared: int | None = None  # tests with a stored run

    @property
    def wanted(self) -> bool:
        """Whether two sides were to be measured: always, but where a comparison with a stored run found no suspects."""
        return self._decision is not None or not self.confirms

    @property
    def replicates(self) -> int:
        """Process sets a side: of the first look, and when that is done of the second."""
        settings = self.settings.default
        first = self._decision is None and not self.confirms
        return settings.screen_sets if first else settings.confirm_sets

    def sides_in_any_order(self) -> list[Side]:
        """Which side begins is left to chance, for what comes first may meet colder caches in every round."""
        return random.sample([self.sides.base, self.sides.candidate], 2)

    def first_look(self, measures: Mapping[str, Measure], pool: Pool) -> list[str]:
        """Judge what the tests measured, with two controls by the same sets; returns the suspects."""
        readings = self._readings(measures)
        readings += self._try_controls(measures, readings, pool)
        measured = [each.measured for each in measures.values() if each.measured is not None]
        if self.sides.spec_fields and not any(each.candidate_spec for each in measured):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self._problems.append(f"no test measures anything that --against-spec {fields} changes")
        self._decision = Decision(readings, self.settings)
        return self._decision.suspects()

    def suspects_of(self, comparison: Comparison | None) -> list[str]:
        """The tests that a comparison with a stored run finds slower, or suspects; none where it could not be had."""
        if comparison is None:
            return []
        self._compared = len(comparison.changes)
        return [*comparison.slower, *comparison.suspects]

    def confirm(self, measures: Mapping[str, Measure], pool: Callable[[], Pool]) -> None:
        """Decide by the suspects' second measurement, on fresh sets; and of a stored run's suspects the first of two sides."""
        readings = self._readings(measures)
        if self._decision is None:
            readings = [*readings, *self._try_controls(measures, readings, pool())]
            self._decision = Decision(readings, self.settings, among=self._compared)
        else:
            self._decision.confirm(readings)
        self.second_look = {test: each.stored for test, each in measures.items() if each.stored}

    def answer(self, comparison: Comparison | None) -> Answer | None:
        """What the run says: of a comparison with a stored run that, unless it had suspects, whom two sides then judged."""
        if comparison is None:
            return None if self.confirms else self.judgement()
        judged = self._decision is not None
        return Confirmed(comparison=comparison, judgement=self.judgement()) if judged else comparison

    def judgement(self) -> Judgement:
        if self._decision is None:
            return Judgement(rows=(), holes={}, problems=["the two sides were not compared: no test measured both to its end"])
        return Judgement(rows=self._decision.rows, holes=self._decision.holes, problems=self._problems)

    def _readings(self, measures: Mapping[str, Measure]) -> list[Reading]:
        return [
            reading
            for test, each in measures.items()
            if each.measured is not None
            for reading in readings_of(test, each.measured, each.metrics, self.device)
        ]

    # --- controls

    def _try_controls(self, measures: Mapping[str, Measure], readings: list[Reading], pool: Pool) -> list[Reading]:
        """The controls' readings; one that cannot be measured is one of the run's problems."""
        measured = {test: each.measured for test, each in measures.items() if each.measured is not None}
        try:
            return self._controls(measured, readings, pool)
        except (SetFailure, ValueError, OSError) as error:
            self._problems.append(f"a control could not be measured: {str(error).splitlines()[0]}")
            return []

    def _controls(self, measured: Mapping[str, Measured], readings: list[Reading], pool: Pool) -> list[Reading]:
        """Of what no change can touch, and of a slow-down in the shortest of the steps that can fail the run by their time."""
        copied = pool.measure(CopySpec(world_size=1, nbytes=COPY_BYTES[self.device]))
        controls = [_control("negative", copied.median_step_seconds(), copied, "copy")]
        timed = [each for each in readings if each.primary and each.gated and each.metric == "time"]
        trained = [each for each in timed if isinstance(measured[each.test].spec, TrainingSpec)]
        if timed:
            chosen = min(trained or timed, key=lambda each: each.base)
            controls.append(self._slowed(measured[chosen.test], chosen, pool))
        return controls

    def _slowed(self, undelayed: Measured, reading: Reading, pool: Pool) -> Reading:
        """By how much a delay slows the candidate down, whatever it changed: its times are taken to the base's level first."""
        before, spec = mean(reading.candidate), undelayed.spec_of(CANDIDATE)
        delay_seconds = spec.delay_seconds + SLOW_DOWN[self.device] * before
        delayed = pool.measure(undelayed.spec, replace(spec, delay_seconds=delay_seconds))
        level = mean(reading.base) / before
        candidates = {sample.set for sample in delayed.samples if sample.side == CANDIDATE}
        seconds = {name: t * level if name in candidates else t for name, t in delayed.median_step_seconds().items()}
        return _control("positive", seconds, delayed, reading.kind)

    # --- telling

    def to_json(self) -> dict[str, Any]:
        """The run's own account of its sides: what they are, what was found of each metric, and the second look's samples."""
        judgement = self.judgement()
        return {
            "base": _side(self.sides.base),
            "candidate": _side(self.sides.candidate) | {"spec": dict(self.sides.spec_fields)},
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in judgement.rows],
            "second_look": self.second_look,
        }


def _control(control: Control, seconds: Mapping[str, float], measured: Measured, kind: Hashable) -> Reading:
    by_side = {side: tuple(seconds[each.set] for each in measured.samples if each.side == side) for side in (BASE, CANDIDATE)}
    return Reading(
        test=f"{control} control",
        metric="time",
        base=by_side[BASE],
        candidate=by_side[CANDIDATE],
        kind=kind,
        control=control,
    )


def _side(side: Side) -> dict[str, Any]:
    return {"python": side.python, "root": side.root and str(side.root), "environment": dict(side.environment)}
