"""What the commands `python -m ddpperf...` have in common: options, refusals and output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

REFUSED = 4  # the exit status of a refusal, as in a test run


class Parser(argparse.ArgumentParser):
    """A parser of a command's options, whose help is the module's docstring.

    A wrong option ends the command with the exit status of a refusal.
    """

    def __init__(self, module: str, docstring: str | None) -> None:
        super().__init__(
            prog=f"python -m {module}",
            description=docstring,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; see --help\n")


def refused(problem: object) -> int:
    """Print one sentence that says why a command was refused, and return the exit status."""
    print(" ".join(str(problem).split()), file=sys.stderr)
    return REFUSED


def print_lines(lines: Iterable[str]) -> None:
    """Print lines in UTF-8, whatever the locale is, and stop if nobody reads them any more.

    Raises OSError if the output cannot be written, as on a full disk.
    """
    if sys.stdout is None:  # closed by the caller, as with >&- in a shell
        return
    try:
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
