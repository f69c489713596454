"""A terminal line with the progress of the tests and of a long measurement, and the time left."""

from __future__ import annotations

import contextlib
import os
import time

from ddpperf.io.terminal_text import printable
from ddpperf.specs import Spec

QUIET_SECONDS = 2.0  # a shorter measurement shows no progress line
REDRAW_SECONDS = 0.5
MAKE_ROOM = "\x1bD\x1b[A"  # one line down, which scrolls at the end of the screen, and up again
BELOW = "\x1b7\x1b[B\r\x1b[K{}\x1b8"  # a text in the emptied line below, then back to the cursor's position


class ProgressLine:
    """A progress line on the terminal, which is updated while a spec is measured.

    Call it with the spec and the fraction of the measurement that is done. The line is below the
    current line of pytest's output. Nothing is printed in CI, or if the output is not a terminal.
    stage: the place in the run, such as "test 7 of 45".
    """

    def __init__(self) -> None:
        self._terminal = os.dup(1)  # because pytest captures stdout itself later
        self._visible = os.isatty(self._terminal) and "CI" not in os.environ
        self.stage = ""
        self._spec: Spec | None = None
        self._begun = self._drawn = 0.0

    def __call__(self, spec: Spec, fraction: float) -> None:
        now = time.monotonic()
        if spec is not self._spec or fraction == 0:
            self._spec, self._begun = spec, now
        if not self._visible or now - self._begun <= QUIET_SECONDS or now - self._drawn <= REDRAW_SECONDS:
            return
        self._drawn = now
        left = "warming up"
        if fraction > 0:
            minutes, seconds = divmod(round((now - self._begun) * (1 - fraction) / fraction), 60)
            left = f"{minutes}:{seconds:02} left"
        words = ", ".join(filter(None, (self.stage, f"{spec.id}: {fraction:.0%}", left)))
        with contextlib.suppress(OSError):  # a terminal that is closed must not fail the tests
            width = os.get_terminal_size(self._terminal).columns or 80
            text = MAKE_ROOM + BELOW.format(printable(words)[: width - 1])
            os.write(self._terminal, text.encode(errors="replace"))

    def clear(self) -> None:
        if self._drawn:
            self._drawn = 0.0
            with contextlib.suppress(OSError):
                os.write(self._terminal, BELOW.format("").encode())

    def close(self) -> None:
        self.clear()
        self._visible = False
        os.close(self._terminal)
