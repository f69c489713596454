"""The progress line: on a terminal only, late enough, with the time left, and gone when the test ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TextIO

import pytest

from ddpperf.plugin import progress
from ddpperf.plugin.progress import QUIET_SECONDS, REDRAW_SECONDS, ProgressLine
from ddpperf.specs import AllReduceSpec
from tests.project import HANG_SECONDS, Project

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
OTHER = AllReduceSpec(world_size=2, nbytes=2048)
SHOWN = "all_reduce world_size=2 nbytes={}"
CLEARED = "\x1b7\x1b[B\r\x1b[K\x1b8"  # the line below is empty, and the cursor where it was


def drawn(text: str) -> str:
    """Return how a text is drawn in the line below the cursor, for which room is made."""
    return f"\x1bD\x1b[A\x1b7\x1b[B\r\x1b[K{text}\x1b8"


class Terminal:
    """A pseudo-terminal of 60 columns; `seen` returns what was written since the last call."""

    def __init__(self) -> None:
        self.screen, self.end = os.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        os.set_blocking(self.screen, False)
        self.stream: TextIO = os.fdopen(self.end, "w")

    def seen(self) -> str:
        self.stream.flush()
        try:
            return os.read(self.screen, 65536).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        self.stream.close()
        os.close(self.screen)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.delenv("CI", raising=False)
    mine = Terminal()
    yield mine
    mine.close()


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets seconds pass on the line's clock."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_only_long_measurements_are_shown(terminal: Terminal, wait: Callable[[float], None]) -> None:
    line = ProgressLine(terminal.stream)
    line.clear()
    line(SPEC, 0.0)
    wait(QUIET_SECONDS)
    line(SPEC, 0.2)
    assert terminal.seen() == ""
    wait(0.5)
    line(SPEC, 0.25)
    assert terminal.seen() == drawn(f"{SHOWN.format(1024)}: 25%, 0:08 left")
    wait(REDRAW_SECONDS / 2)
    line(SPEC, 0.3)
    assert terminal.seen() == "", "redrawn at once it would flicker"
    wait(REDRAW_SECONDS)
    line(SPEC, 0.5)
    assert terminal.seen() == drawn(f"{SHOWN.format(1024)}: 50%, 0:03 left")
    for expected in (CLEARED, ""):
        line.clear()
        assert terminal.seen() == expected


def test_each_measurement_is_timed_by_itself(terminal: Terminal, wait: Callable[[float], None]) -> None:
    line = ProgressLine(terminal.stream)
    line.stage = "test 7 of 45"
    line(SPEC, 0.0)
    wait(100)
    line(OTHER, 0.5)
    assert terminal.seen() == "", "another spec has just begun"
    wait(QUIET_SECONDS + 1)
    line(OTHER, 0.0)
    assert terminal.seen() == "", "the same spec has begun again"
    wait(QUIET_SECONDS + 1)
    line(OTHER, 0.75)
    whole = f"test 7 of 45, {SHOWN.format(2048)}: 75%, 0:01 left"
    assert terminal.seen() == drawn(whole[:59]), "as much as the terminal is wide"


@pytest.mark.parametrize("where", ["CI", "a pipe"])
def test_nothing_is_written_without_a_reader(
    terminal: Terminal, wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "CI":
        monkeypatch.setenv("CI", "true")
    reading, writing = os.pipe()
    with os.fdopen(reading) as log, os.fdopen(writing, "w") as stream:
        line = ProgressLine(terminal.stream if where == "CI" else stream)
        line(SPEC, 0.0)
        wait(100)
        line(SPEC, 0.5)
        line.clear()
        stream.close()
        assert log.read() == terminal.seen() == ""


@pytest.mark.slow
def test_long_measurement_is_shown_while_it_runs(project: Project) -> None:
    """With its delays a round takes a second."""
    project.experiment.write_text(project.experiment.read_text().replace("1024", "1024, delay_seconds=0.5"))
    project.environment.pop("CI", None)
    terminal = Terminal()
    os.set_blocking(terminal.screen, True)
    process = project.start("perf", "--rounds", "4", "--color", "no", output=terminal.end)
    terminal.stream.close()
    written = ""
    with contextlib.suppress(OSError):  # how a terminal ends that nobody else has open
        while piece := os.read(terminal.screen, 65536).decode():
            written += piece
    os.close(terminal.screen)
    assert process.wait(timeout=HANG_SECONDS) == 0, written
    lines = re.findall(r"\x1b7\x1b\[B\r\x1b\[K([^\x1b]+)\x1b8", written)
    assert lines, written
    assert lines[-1].startswith("test 1 of 1, all_reduce world_size=2 delay_seconds=0.5"), written
    assert f"{lines[-1]}\x1b8{CLEARED}." in written, "the line is removed before the test's dot"
    project.assert_nothing_left()
