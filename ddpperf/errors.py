"""The errors that end a run with one sentence for the user. Standard library only."""

from __future__ import annotations


class Refused(Exception):
    """Bad input, or a machine that cannot do what was requested; one sentence says what to do."""


class CannotTrain(ValueError):
    """A training that cannot run as its spec requires; one sentence says why and what to do."""


MAX_LETTERS = 200  # of an error that is quoted in a sentence


def first_line(error: BaseException) -> str:
    """Return the first line of an error, short enough to be quoted in a sentence."""
    return (str(error).strip().splitlines() or ["no message"])[0][:MAX_LETTERS]


def last_line(error: BaseException) -> str:
    """Return the last line of an error, for errors that end with the reason."""
    return (str(error).strip().splitlines() or ["no message"])[-1].strip(" -")[:MAX_LETTERS]
