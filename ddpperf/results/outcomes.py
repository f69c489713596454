"""The outcome of each test with notes on its measurements, and the verdict on a whole test run."""

from __future__ import annotations

import enum
from dataclasses import dataclass

AGAIN = "run the same command again"  # part of an advice, which the summary completes by the command


class Status(enum.StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NO_VERDICT = "NO VERDICT"


class OutcomeKind(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    NOT_COLLECTED = "not collected"
    BASE_FAILED = "base failed"  # the base failed in an A/B run, so the candidate was not judged
    CANDIDATE_CANNOT = "candidate cannot"  # skipped, because only the candidate cannot measure it

    @property
    def skipped(self) -> bool:
        return self in (OutcomeKind.SKIPPED, OutcomeKind.CANDIDATE_CANNOT)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The way in which one test ended, with the first line of the reason."""

    kind: OutcomeKind
    reason: str = ""


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
    return Note(NoteKind.WARNING, text)


def info(text: str) -> Note:
    return Note(NoteKind.INFO, text)


@dataclass(frozen=True)
class Reason:
    """A reason for a verdict, as a sentence, and what the user can do about it."""

    text: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The status of a whole test run (PASS, FAIL or NO VERDICT), with one line for each reason.

    `advice` is the next step that follows from the first reason; empty if the status says it.
    """

    status: Status
    reasons: tuple[str, ...]
    advice: str = ""
