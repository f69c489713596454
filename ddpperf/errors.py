"""The errors that end a run with one sentence for the user. Standard library only."""

from __future__ import annotations


class Refused(Exception):
    """Bad input, or a machine that cannot do what was requested; one sentence says what to do."""


class CannotTrain(ValueError):
    """A model, a form or an option cannot be had here; one sentence says why, and what to do."""


MOST_LETTERS = 200  # of an error within a sentence


def first_line(error: BaseException) -> str:
    """What an error says, as far as one sentence has room for it."""
    return (str(error).strip().splitlines() or ["no message"])[0][:MOST_LETTERS]


def last_line(error: BaseException) -> str:
    """The same, where the reason comes last."""
    return (str(error).strip().splitlines() or ["no message"])[-1].strip(" -")[:MOST_LETTERS]
