"""Notes on a test's measurements: warnings about the result, and explanations of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
