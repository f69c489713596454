"""A step's seconds, then and now: of a test of the suite, or of a control of the comparison itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Change:
    """Seconds of a step, then and now: its median time, or its CPU seconds; a ratio above `limit` is slower.

    suspect_limit: what is above it but not slower may be so by chance in a suite; None where one limit decides.
    """

    then_seconds: float
    now_seconds: float
    limit: float
    suspect_limit: float | None = None
    quantity: Literal["step", "CPU seconds"] = "step"

    @property
    def ratio(self) -> float:
        """Now over then: above 1 is slower."""
        return self.now_seconds / self.then_seconds

    @property
    def slower(self) -> bool:
        return self.ratio > self.limit

    @property
    def suspect(self) -> bool:
        return self.suspect_limit is not None and self.suspect_limit < self.ratio <= self.limit


@dataclass(frozen=True, kw_only=True)
class Controls:
    """What a comparison with a stored run is controlled by.

    negative: a copy of memory, then and now, which must not differ. positive: a step of now, as it is and slowed down to beyond
    its test's limit, which must be called slower. holes: why there is none of them, a sentence each.
    """

    negative: Change | None = None
    positive: Change | None = None
    missing: Sequence[str] = ()

    def failed(self) -> list[str]:
        """Why the comparison cannot be trusted, a sentence each; none if it can."""
        failed = []
        if (copy := self.negative) is not None and (copy.slower or 1 / copy.ratio > copy.limit):
            failed.append(
                f"the negative control failed: a copy of memory, which no change can touch, takes {copy.ratio:.3f} times as "
                f"long, limit {copy.limit:.4g} either way; this machine is not as it was"
            )
        if (delayed := self.positive) is not None and not delayed.slower:
            failed.append(
                f"the positive control failed: a slow-down that was put in was found at {delayed.ratio:.3f} times, "
                f"limit {delayed.limit:.4g}"
            )
        return failed

    def found(self) -> Mapping[str, Change]:
        """Those that were measured, by what they are of."""
        found = {"a copy of memory": self.negative, "a slow-down put in": self.positive}
        return {what: change for what, change in found.items() if change is not None}
