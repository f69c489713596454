"""The base and the candidate of an A/B run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpperf.errors import quoted
from ddpperf.io.secret_values import shown_value
from ddpperf.plugin.options.option_table import Value
from ddpperf.plugin.options.spec_fields import changed
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import Spec
from ddpperf.workers.interpreter import Found, Side

OPTION = {BASE: "--base", CANDIDATE: "--candidate"}


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How the base and the candidate of an A/B run are started, and how they differ.

    spec_fields: training fields that only the candidate changes.
    delay_seconds: an artificial delay of the candidate's steps; None for that of the base.
    found: what the interpreters can import, by side, of sides that were checked.
    """

    base: Side
    candidate: Side
    spec_fields: Mapping[str, Value]
    delay_seconds: float | None = None
    found: Mapping[str, Found] = field(default_factory=dict)

    @property
    def torchvision(self) -> bool:
        """Whether base and candidate both have torchvision, as far as they were checked."""
        return all(found.torchvision for found in self.found.values())

    @property
    def base_torch(self) -> str:
        """The base's version of torch, or "" if it was not checked."""
        return self.found[BASE].torch if BASE in self.found else ""

    def are_equal(self, here: Path) -> bool:
        """Return whether base and candidate run the same code in the same way.

        here: the source tree of a side without a root.
        """
        base, candidate = (
            (
                Path(side.python).parent.resolve(),
                Path(side.python).resolve(),
                (side.root or here).resolve(),
                side.environment,
            )
            for side in (self.base, self.candidate)
        )
        return base == candidate and not self.spec_fields and self.delay_seconds is None

    @property
    def here(self) -> str:
        """The name of the side, base or candidate, that runs in this Python environment.

        If neither does, the name is that of the base.
        """
        return CANDIDATE if is_elsewhere(self.base) and not is_elsewhere(self.candidate) else BASE

    def candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """Return the candidate's measurement spec, or None if it equals the base's spec.

        own: whether `spec` is the test's own spec, not a reference.
        """
        other = changed(spec, self.spec_fields)
        if own and self.delay_seconds is not None:
            other = dataclasses.replace(other, delay_seconds=self.delay_seconds)
        return other if other != spec else None


def is_elsewhere(side: Side) -> bool:
    """Return whether a side of an A/B run differs from this process in interpreter or code."""
    return side != Side(name=side.name)


def options_of_side(side: Side) -> str:
    """Return the command-line options that describe the base or the candidate."""
    named = [side.python] if side.python != sys.executable else []
    named += [str(side.root)] if side.root is not None else []
    named += [f"{name}={quoted(shown_value(name, value))}" for name, value in side.environment.items()]
    return " ".join(f"{OPTION[side.name]} {value}" for value in named)
