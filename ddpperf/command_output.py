"""Printing of the lines of a command, to any terminal, file or pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def print_lines(lines: Iterable[str]) -> None:
    """Print lines in UTF-8, whatever the locale is, and stop if nobody reads them any more.

    Raises OSError if the output cannot be written, as on a full disk.
    """
    try:
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
