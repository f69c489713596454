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
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.plugin import progress
from ddpperf.plugin.progress import QUIET_SECONDS, REDRAW_SECONDS, ProgressLine, time_left
from ddpperf.specs import AllReduceSpec
from tests.generated import BOUNDED
from tests.project import HANG_SECONDS, Project

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
OTHER = AllReduceSpec(world_size=2, nbytes=2048)
ROOM = "\x1bD\x1b[A"  # a line below the cursor's, made where there is none
CLEARED = "\x1b7\x1b[B\r\x1b[K\x1b8"  # that line is empty, and the cursor where it was


def drawn(text: str) -> str:
    """The line below the cursor's with this text, and the cursor where it was."""
    return f"{ROOM}\x1b7\x1b[B\r\x1b[K{text}\x1b8"


class Terminal:
    """A pseudo-terminal, `columns` wide; `seen` gives what was written to it since it was asked last."""

    def __init__(self, columns: int = 120) -> None:
        self.screen, self.end = os.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
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
    """Lets seconds pass on the line's clock."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_what_is_short_is_not_told_and_what_is_long_is(
    terminal: Terminal, wait: Callable[[float], None]
) -> None:
    line = ProgressLine(terminal.stream)
    line(SPEC, 0.0)
    wait(QUIET_SECONDS)
    line(SPEC, 0.2)
    assert terminal.seen() == ""
    wait(0.5)
    line(SPEC, 0.25)
    assert terminal.seen() == drawn("all_reduce world_size=2 nbytes=1024: 25%, 0:08 left")
    wait(REDRAW_SECONDS / 2)
    line(SPEC, 0.3)
    assert terminal.seen() == "", "redrawn at once it would flicker"
    wait(REDRAW_SECONDS)
    line(SPEC, 0.5)
    assert terminal.seen() == drawn("all_reduce world_size=2 nbytes=1024: 50%, 0:03 left")


def test_each_measurement_is_timed_by_itself(terminal: Terminal, wait: Callable[[float], None]) -> None:
    line = ProgressLine(terminal.stream)
    line.stage = "test 7 of 45"
    line(SPEC, 0.0)
    wait(100)
    line(OTHER, 0.5)
    assert terminal.seen() == "", "another spec has just begun"
    wait(QUIET_SECONDS + 1)
    line(OTHER, 0.0)
    assert terminal.seen() == "", "so has the same one again"
    wait(QUIET_SECONDS + 1)
    line(OTHER, 0.75)
    assert terminal.seen() == drawn("test 7 of 45, all_reduce world_size=2 nbytes=2048: 75%, 0:01 left")


def test_foreign_text_is_not_obeyed(terminal: Terminal, wait: Callable[[float], None]) -> None:
    line = ProgressLine(terminal.stream)
    line.show("decoding a\x1b[2J\n::error::b")
    assert terminal.seen() == drawn("decoding a?[2J ::error::b")


def test_the_line_is_taken_away_once(terminal: Terminal, wait: Callable[[float], None]) -> None:
    line = ProgressLine(terminal.stream)
    line.clear()
    assert terminal.seen() == "", "nothing was shown yet"
    line(SPEC, 0.0)
    wait(QUIET_SECONDS + 1)
    line(SPEC, 0.5)
    terminal.seen()
    line.clear()
    assert terminal.seen() == CLEARED
    line.clear()
    assert terminal.seen() == ""


def test_the_line_fits_the_terminal(terminal: Terminal, wait: Callable[[float], None]) -> None:
    narrow = Terminal(columns=20)
    line = ProgressLine(narrow.stream)
    line(SPEC, 0.0)
    wait(QUIET_SECONDS + 1)
    line(SPEC, 0.5)
    assert narrow.seen() == drawn("all_reduce world_si")
    narrow.close()


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


@BOUNDED
@given(st.floats(0, 1e5), st.floats(1e-3, 1))
def test_the_time_left_is_that_of_the_same_pace(elapsed: float, fraction: float) -> None:
    minutes, seconds = time_left(elapsed, fraction).removesuffix(" left").split(":")
    assert 0 <= int(seconds) < 60
    assert len(seconds) == 2
    assert 60 * int(minutes) + int(seconds) == pytest.approx(elapsed / fraction - elapsed, abs=0.51)


@pytest.mark.slow
def test_a_long_measurement_is_told_while_it_runs(project: Project) -> None:
    """In a run on a terminal: with its delays a round takes a second."""
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
    line = "test 1 of 1, all_reduce world_size=2 delay_seconds=0.5 nbytes=1024: "
    drawn_lines = re.findall(r"\x1b7\x1b\[B\r\x1b\[K([^\x1b]*)\x1b8", written)
    shown = [text for text in drawn_lines if text.startswith(line)]
    assert re.match(rf"{line}(50|75)%, 0:0", shown[0]), written
    assert shown[-1] == f"{line}100%, 0:00 left", written
    assert f"{shown[-1]}\x1b8{CLEARED}." in written, "it is taken away before the test's dot"
    project.assert_nothing_left()
