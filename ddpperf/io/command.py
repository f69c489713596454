"""Code that the commands `python -m ddpperf...` share: options, refusals and output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from ddpperf.errors import quoted
from ddpperf.io.terminal_text import harmless

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


def hour_price(text: str) -> float:
    """Convert text to the price of one device for one hour, or raise argparse.ArgumentTypeError."""
    if not 0 < (price := float(text)) <= 999999:  # a NaN is refused, too
        raise argparse.ArgumentTypeError(f"takes a price above 0 and up to 999999, got {quoted(text)}")
    return price


def refused(problem: object) -> int:
    """Print one sentence that says why a command was refused, and return the exit status."""
    print(harmless(" ".join(str(problem).split())), file=sys.stderr)
    return REFUSED


def print_lines(lines: Iterable[str]) -> None:
    """Print lines in UTF-8 in any locale. It is no error if the reader of a pipe has ended.

    Raises OSError if the output cannot be written, as on a full disk.
    """
    if sys.stdout is None:  # closed by >&-
        return
    try:
        text = "".join(f"{harmless(line)}\n" for line in lines)
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
