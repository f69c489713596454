"""Exceptions that end a test run with a one-sentence message for the user.

This module imports only the standard library.
"""

from __future__ import annotations

import reprlib


class Refused(Exception):
    """Raised for invalid user input or an unsuitable machine. The message is one sentence."""


class CannotTrain(ValueError):
    """Raised if a model cannot be trained as the spec says. The message is one sentence."""


MAX_LETTERS = 120  # of an error that is quoted in a sentence


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, printable and cut to 120 characters."""
    return short((str(error).strip().splitlines() or ["no message"])[0])


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message, printable and cut to 120 characters."""
    return short((str(error).strip().splitlines() or ["no message"])[-1].strip(" -"))


def short(text: str, most: int = MAX_LETTERS) -> str:
    """Return at most `most` characters of a text, with control characters written as escapes.

    A longer text is cut between two words, or in a word that is long, such as a path.
    """
    letters = (letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: most + 1])
    if len(shown := "".join(letters)) <= most:
        return shown
    place = shown.rfind(" ", most * 3 // 4, most - 3)
    return f"{shown[: place if place > 0 else most - 4]} ..."


QUOTED_LETTERS = 50
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, *[QUOTED_LETTERS] * 3


def quoted(value: object) -> str:
    """Return a value as Python writes it, on one line and cut to 50 characters.

    Use it in a sentence for a value that a user or a file gave. Control characters are escaped.
    """
    try:
        return _SHORT.repr(value)[: QUOTED_LETTERS + 2]
    except ValueError:  # Python writes no number of more than 4300 digits, which hexadecimal TOML may have
        return "a huge number"
