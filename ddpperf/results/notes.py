"""Remarks about a test's figures, stored with the test."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NoteKind(enum.StrEnum):
    """Whether a note questions the figures (warning) or explains them (info)."""

    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Note:
    """One remark about a test's figures."""

    kind: NoteKind
    text: str

    def to_json(self) -> dict[str, str]:
        """Return the note as a JSON object."""
        return {"kind": str(self.kind), "text": self.text}


def warning(text: str) -> Note:
    """Return a note that questions the figures."""
    return Note(NoteKind.WARNING, text)


def info(text: str) -> Note:
    """Return a note that explains the figures."""
    return Note(NoteKind.INFO, text)
