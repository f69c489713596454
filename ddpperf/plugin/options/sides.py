"""The two sides of an A/B run: the base and the candidate."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpperf.plugin.options.spec_fields import changed
from ddpperf.plugin.options.values import Value
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import Spec
from ddpperf.workers.interpreter import Side


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The base and the candidate.

    spec_fields: of the candidate's trainings. delay_seconds: added to the candidate's steps.
    torchvision: whether both sides have it. base_torch: the base's version, "" if not checked.
    """

    base: Side
    candidate: Side
    spec_fields: Mapping[str, Value]
    delay_seconds: float = 0.0
    torchvision: bool = True
    base_torch: str = ""

    def are_equal(self, here: Path) -> bool:
        """Return whether both sides run the same code in the same way.

        here: the tree of a side without a root.
        """
        base, candidate = (
            (Path(side.python).parent.resolve(), Path(side.python).resolve(), (side.root or here).resolve())
            for side in (self.base, self.candidate)
        )
        return base == candidate and not (
            self.spec_fields or self.delay_seconds or self.candidate.environment
        )

    @property
    def here(self) -> str:
        """The name of the side that runs in this environment; the base's if neither does."""
        return CANDIDATE if is_elsewhere(self.base) and not is_elsewhere(self.candidate) else BASE

    def candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """Return what the candidate measures where the base measures `spec`; None if the same.

        own: whether `spec` is the test's own and not a reference.
        """
        other = changed(spec, self.spec_fields)
        if own and self.delay_seconds:
            other = dataclasses.replace(other, delay_seconds=self.delay_seconds)
        return other if other != spec else None


def is_elsewhere(side: Side) -> bool:
    """Return whether a side runs in another environment than this process."""
    return side != Side(name=side.name)


def options_of_side(side: Side) -> str:
    """Return the options that describe a side, as they are typed."""
    python, root = (
        ("--baseline-python", "--baseline-root") if side.name == BASE else ("--against", "--against-root")
    )
    words = [f"{python} {side.python}"] if side.python != sys.executable else []
    words += [f"{root} {side.root}"] if side.root is not None else []
    return " ".join(
        words + [f"--against-env {name}={value[:40]!r}" for name, value in side.environment.items()]
    )
