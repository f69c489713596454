"""How a test ended, and what a whole run concluded."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """The conclusion of a run."""

    PASS = "PASS"
    FAIL = "FAIL"
    NO_VERDICT = "NO VERDICT"


class OutcomeKind(enum.StrEnum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    NOT_COLLECTED = "not collected"
    BASE_FAILED = "base failed"  # the base failed in an A/B run, so the candidate was not judged
    CANDIDATE_CANNOT = "candidate cannot"  # skipped, because only the candidate cannot measure it

    @property
    def skipped(self) -> bool:
        """Whether pytest skipped the test."""
        return self in (OutcomeKind.SKIPPED, OutcomeKind.CANDIDATE_CANNOT)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test ended, with the first line of the reason."""

    kind: OutcomeKind
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A run's status with its reasons, one line each."""

    status: Status
    reasons: tuple[str, ...]
