"""The decision between a run's two sides: after the tests two controls, then the suspects again on fresh process sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import mean
from typing import Any

from ddpperf.plugin.controls import SLOW_DOWN, copy_spec, shortest, slowed
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.verdict.ab import Decision
from ddpperf.verdict.ab_answer import Confirmed, Judgement
from ddpperf.verdict.estimates import Control, Reading, readings_of
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run import Comparison
from ddpperf.verdict.verdict import Answer
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool


class Gate:
    """What a run with two sides decides. confirms: only of the suspects of a comparison with a stored run, the base's."""

    def __init__(
        self, sides: Sides, settings: DecisionSettings, device: str, replicates: int | None, *, confirms: bool
    ) -> None:
        self.sides = sides
        self.confirms = confirms
        self.active = not confirms  # whether the sides measure, or have
        self.device = device
        self.settings = settings.with_sets(replicates) if replicates is not None else settings
        self.confirmation: dict[str, Any] = {}
        self._decision: Decision | None = None
        self._torch: dict[str, str] = {}  # by side
        self._problems: list[str] = []
        self._suspects: list[str] = []  # of the comparison with a stored run

    @property
    def name(self) -> str:
        """Under which a run's JSON has it: a stored run's suspects alone were measured by two sides, all else by one."""
        return "confirmed" if self.confirms else "against"

    @property
    def replicates(self) -> int:
        """Process sets a side: of the first look, and when that is done of the second."""
        settings = self.settings.default
        first = self._decision is None and not self.confirms
        return settings.screen_sets if first else settings.confirm_sets

    def sides_in_any_order(self) -> list[Side]:
        """Which side begins is left to chance, for what comes first may meet colder caches in every round."""
        return random.sample([self.sides.base, self.sides.candidate], 2)

    def screening(self, measures: Mapping[str, Measure], pool: Pool) -> list[str]:
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
        self._suspects = [*comparison.slower, *comparison.suspects] if comparison is not None else []
        return self._suspects

    def confirm(self, measures: Mapping[str, Measure], pool: Callable[[], Pool]) -> None:
        """Decide by the suspects' second measurement, on fresh sets; and of a stored run's suspects the first of two sides."""
        readings = self._readings(measures)
        if self._decision is None:
            readings = [*readings, *self._try_controls(measures, readings, pool())]
            self._decision = Decision(readings, self.settings, suspects_only=True)
            judged = {row.test for row in self._decision.rows if row.primary and row.gated}
            for test in [test for test in self._suspects if test not in judged]:
                self._decision.missing.setdefault(
                    test, "is a suspect, and two sides cannot judge what it stands for"
                )
        else:
            self._decision.confirm(readings)
        self.confirmation = {test: each.stored for test, each in measures.items() if each.stored}

    def answer(self, comparison: Comparison | None, unmeasured: Sequence[str] = ()) -> Answer | None:
        """What the run says: of a comparison with a stored run that, unless it had suspects, whom two sides then judged.
        unmeasured: tests that the candidate cannot measure."""
        if comparison is None:
            return None if self.confirms else self.judgement(unmeasured)
        if self._suspects and self._decision is None:
            unseen = dict.fromkeys(
                self._suspects, "was to be measured beside the stored run's code, and was not"
            )
            judgement = Judgement(rows=(), missing=unseen, problems=self._problems)
            return Confirmed(comparison=comparison, judgement=judgement)
        judged = self._decision is not None
        return Confirmed(comparison=comparison, judgement=self.judgement()) if judged else comparison

    def judgement(self, unmeasured: Sequence[str] = ()) -> Judgement:
        if self._decision is None:
            return Judgement(
                rows=(),
                missing={},
                problems=["the two sides were not compared: no test measured both to its end"],
            )
        option = "in perf/thresholds.toml confirm_sets =" if self.confirms else "--replicates"
        rows, missing = self._decision.rows, self._decision.missing
        return Judgement(
            rows=rows, missing=missing, problems=self._problems, unmeasured=unmeasured, sets_option=option
        )

    def _readings(self, measures: Mapping[str, Measure]) -> list[Reading]:
        measured = [each.measured for each in measures.values() if each.measured is not None]
        self._torch |= {sample.side: sample.torch for each in measured for sample in each.samples}
        return [
            reading
            for test, each in measures.items()
            if each.measured is not None
            for reading in readings_of(test, each.measured, each.metrics, self.device)
        ]

    # --- controls

    def _try_controls(
        self, measures: Mapping[str, Measure], readings: list[Reading], pool: Pool
    ) -> list[Reading]:
        """The controls' readings; one that cannot be measured is one of the run's problems."""
        measured = {test: each.measured for test, each in measures.items() if each.measured is not None}
        controls: list[Reading] = []
        for control in (self._untouched, partial(self._slowed_down, measured, readings)):
            try:
                controls += control(pool)
            except (SetFailure, ValueError, OSError) as error:
                self._problems.append(f"a control could not be measured: {str(error).splitlines()[0]}")
        return controls

    def _untouched(self, pool: Pool) -> list[Reading]:
        """Of what no change can touch."""
        copied = pool.measure(copy_spec(self.device)).median_step_seconds()
        base, candidate = (
            {name: t for name, t in copied.items() if name.startswith(side)} for side in (BASE, CANDIDATE)
        )
        return [_control("negative", base, candidate, "copy")]

    def _slowed_down(
        self, measured: Mapping[str, Measured], readings: list[Reading], pool: Pool
    ) -> list[Reading]:
        """Of the shortest step that can fail the run by its time: the candidate's sets, without a delay and with one.

        Whatever the candidate changed, its sets differ as they do, and so the delay is judged as a change would be.
        """
        timed = {
            each.test: each for each in readings if each.primary and each.gated and each.metric == "time"
        }
        if (test := shortest({test: mean(each.base) for test, each in timed.items()}, measured)) is None:
            return []
        spec = measured[test].spec_of(CANDIDATE)
        before = {
            name: t for name, t in measured[test].median_step_seconds().items() if name.startswith(CANDIDATE)
        }
        delayed = pool.measure(
            measured[test].spec, slowed(spec, SLOW_DOWN[self.device] * mean(before.values()))
        )
        after = {name: t for name, t in delayed.median_step_seconds().items() if name in before}
        return [_control("positive", before, after, timed[test].kind)]

    # --- telling

    def to_json(self) -> dict[str, Any]:
        """The run's own account of its sides: what they are, what was found of each metric, and the second look's samples."""
        judgement = self.judgement()
        return {
            "base": _side(self.sides.base) | {"torch": self._torch.get(BASE)},
            "candidate": _side(self.sides.candidate)
            | {"torch": self._torch.get(CANDIDATE), "spec": dict(self.sides.spec_fields)},
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in judgement.rows],
            "confirmation": self.confirmation,
        }


def _control(
    control: Control, base: Mapping[str, float], candidate: Mapping[str, float], kind: Hashable
) -> Reading:
    """Seconds by set."""
    return Reading(
        test=f"{control} control",
        metric="time",
        base=tuple(base.values()),
        candidate=tuple(candidate.values()),
        kind=kind,
        control=control,
    )


def _side(side: Side) -> dict[str, Any]:
    return {
        "python": side.python,
        "root": side.root and str(side.root),
        "environment": dict(side.environment),
    }
