"""A line that says how far a long measurement is, and how long it will still take. Only on a terminal: quiet in CI's logs."""

from __future__ import annotations

import os
import time
from typing import TextIO

from ddpperf.specs import Spec

QUIET_SECONDS = 2.0  # what is shorter is not told
REDRAW_SECONDS = 0.5
MAKE_ROOM = "\x1bD\x1b[A"  # down, which scrolls where the line is the last one, and up again
SAVE, RESTORE = "\x1b7", "\x1b8"  # the cursor's place
LINE_BELOW = "\x1b[B\r\x1b[K"  # emptied


class ProgressLine:
    """Called with the spec that is measured and the fraction of it that is done; `clear` takes the line away again."""

    def __init__(self, terminal: TextIO) -> None:
        """terminal: a stream of its own on the terminal, for pytest captures what tests write to the usual one."""
        self._terminal = terminal
        self._spec: Spec | None = None
        self._begun = self._drawn = 0.0
        self._shown = False
        self._wanted = terminal.isatty() and "CI" not in os.environ

    def __call__(self, spec: Spec, fraction: float) -> None:
        now = time.monotonic()
        if spec is not self._spec or fraction == 0:
            self._spec, self._begun = spec, now
        if self._wanted and now - self._begun > QUIET_SECONDS and now - self._drawn > REDRAW_SECONDS:
            self._draw(f"{spec.id}: {fraction:.0%}, {time_left(now - self._begun, fraction)}")
            self._drawn = now

    def _draw(self, text: str) -> None:
        """Below the line that pytest writes on, to which the cursor then goes back."""
        width = os.get_terminal_size(self._terminal.fileno()).columns or 80
        self._terminal.write(MAKE_ROOM)
        self._write(text[: width - 1])
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        self._terminal.write(f"{SAVE}{LINE_BELOW}{text}{RESTORE}")
        self._terminal.flush()

    def close(self) -> None:
        self.clear()
        self._terminal.close()


def time_left(elapsed_seconds: float, fraction: float) -> str:
    """How long the rest takes if it goes on as until now, such as "1:05 left"."""
    if fraction <= 0:
        return "warming up"
    minutes, seconds = divmod(round(elapsed_seconds * (1 - fraction) / fraction), 60)
    return f"{minutes}:{seconds:02} left"
