"""The base and the candidate of an A/B run, and the training fields in which they differ."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpperf.errors import quoted
from ddpperf.io.secret_values import shown_value
from ddpperf.plugin.options.option_table import Value
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import Spec, TrainingSpec
from ddpperf.specs.training_step import (
    COMPILED_EXECUTIONS,
    DDP_OPTIONS,
    GROUPED_STRATEGIES,
    OWN_DDP_HOOKS,
    SHARDED_STRATEGIES,
    options_of,
)
from ddpperf.workers.interpreter import Found, Side

VERSIONS = ("torch", "nccl")  # in the ranks of each side
OPTION = {BASE: "--base", CANDIDATE: "--candidate"}


def fitting(given: Mapping[str, Value], strategy: str, execution: str) -> dict[str, Value]:
    """Return the given training fields that a strategy and an execution mode support."""
    left_out = DDP_OPTIONS.keys() - options_of(strategy) | {"strategy"}
    left_out |= set() if strategy in GROUPED_STRATEGIES else {"sync_batch_norm"}
    left_out |= set() if execution in COMPILED_EXECUTIONS else {"inductor"}
    return {name: value for name, value in given.items() if name not in left_out}


def changed(spec: Spec, given: Mapping[str, Value]) -> Spec:
    """Return a copy of a training spec with the given fields changed.

    Fields that the training does not have are left out. "execution" may be one of the fields.
    Raises ValueError if such a training is impossible.
    """
    if not (given and isinstance(spec, TrainingSpec)):
        return spec
    fields: dict[str, Any] = {"execution": spec.execution, "inductor": spec.inductor, **given}
    strategy = fields.get("strategy", spec.strategy) if spec.strategy in GROUPED_STRATEGIES else spec.strategy
    fields = {"inductor": "", **fitting(fields, strategy, fields["execution"]), "strategy": strategy}
    fields = {name: value for name, value in DDP_OPTIONS.items() if name not in options_of(strategy)} | fields
    if strategy == "own_ddp" and spec.comm_hook not in OWN_DDP_HOOKS:
        fields = {"comm_hook": "none"} | fields
    if strategy in SHARDED_STRATEGIES:
        fields["memory_format"] = "contiguous"
    return dataclasses.replace(spec, **fields)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How the base and the candidate of an A/B run are started, and how they differ."""

    base: Side
    candidate: Side
    spec_fields: Mapping[str, Value]  # training fields that only the candidate changes
    found: Mapping[str, Found] = field(default_factory=dict)  # by name, of sides that were checked

    def to_json(self, versions: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
        """Return JSON values that describe base and candidate. versions: of torch and NCCL, by side."""
        base, candidate = (
            {
                "python": side.python,
                "root": side.root and str(side.root),
                "environment": {name: shown_value(name, value) for name, value in side.environment.items()},
                **versions.get(side.name, {}),
            }
            for side in (self.base, self.candidate)
        )
        return {"base": base, "candidate": candidate | {"spec": dict(self.spec_fields)}}

    def have_equal_code(self, here: Path) -> bool:
        """Return whether base and candidate differ at most in variables and training fields.

        here: the source tree of a side without a root.
        """

        def runs(side: Side) -> tuple[object, ...]:
            python, root = Path(side.python), side.root or here
            path = side.environment.get("PYTHONPATH")  # names other code, too
            return python.parent.resolve(), python.resolve(), root.resolve(), path

        return runs(self.base) == runs(self.candidate)

    def candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """Return the candidate's measurement spec, or None if it equals the base's spec.

        own: whether `spec` is the test's own spec. Only own specs get the candidate's
        delay_seconds.
        """
        fields: dict[str, Any] = {"delay_seconds": spec.delay_seconds, **self.spec_fields}
        delay_seconds = fields.pop("delay_seconds")
        other = changed(spec, fields)
        if own:
            other = dataclasses.replace(other, delay_seconds=delay_seconds)
        return other if other != spec else None


def options_of_side(side: Side) -> str:
    """Return the command-line options that describe the base or the candidate."""
    named = [side.python] if side.python != sys.executable else []
    named += [str(side.root)] if side.root is not None else []
    named += [f"{name}={quoted(shown_value(name, value))}" for name, value in side.environment.items()]
    return " ".join(f"{OPTION[side.name]} {value}" for value in named)
