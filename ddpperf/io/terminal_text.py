"""Make text from others harmless in a terminal, on a page and in a log, and read JSON from others.

Foreign text is text that this run did not write itself: the names of image files and of a user's
models, the output of ranks, environment variables, and stored runs. This module imports only the
standard library.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_LINE_LETTERS = 300
MAX_LINES = 200

# All C0 and C1 control characters but newline and tab, and characters that reorder a line's text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# GitHub's runner looks for `::` after leading spaces, and for `##[` anywhere in a line.
_COMMANDS = re.compile(r"^(\s*):(?=:)|##(?=\w*\[)", re.MULTILINE)


def printable(text: str) -> str:
    """Return text in which `?` replaces control characters, which a terminal would obey.

    Newlines and tabs stay.
    """
    return text if text.isprintable() else _CONTROLS.sub("?", text)


def harmless(text: str) -> str:
    """Return printable text whose lines are no workflow commands, such as `::error::`."""
    return _COMMANDS.sub(lambda found: f"{found[0]} ", printable(text))


def printable_document(value: Any) -> Any:
    """Return a JSON value in which all strings and keys are printable, and a NaN is a text."""
    match value:
        case str():
            return printable(value)
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {printable(str(key)): printable_document(inner) for key, inner in value.items()}
        case list() | tuple():
            return [printable_document(inner) for inner in value]
    return value


def finite_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; raise ValueError also for a NaN and for Infinity."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def shortened(text: str) -> str:
    """Return text without its middle if it has many lines, and with long lines cut."""
    lines = text.splitlines()
    if (dropped := len(lines) - MAX_LINES) > 0:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"... ({dropped} lines dropped)", *lines[-half:]]
    return "\n".join(
        line if len(line) <= MAX_LINE_LETTERS else f"{line[:MAX_LINE_LETTERS]}... ({len(line)} characters)"
        for line in lines
    )
