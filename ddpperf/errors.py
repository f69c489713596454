"""Exceptions that end a test run with a one-sentence message for the user.

This module imports only the standard library.
"""

from __future__ import annotations


class Refused(Exception):
    """Raised for invalid user input or an unsuitable machine. The message is one sentence."""


class CannotTrain(ValueError):
    """Raised if a model cannot be trained as the spec says. The message is one sentence."""


MAX_LETTERS = 200  # of an error that is quoted in a sentence


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, cut to 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:MAX_LETTERS]


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message, cut to 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[-1].strip(" -")[:MAX_LETTERS]
