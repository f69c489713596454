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


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Let standard output be a terminal of 60 columns; return a function that reads what is new on it."""
    monkeypatch.delenv("CI", raising=False)
    reading, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    os.set_blocking(reading, False)
    monkeypatch.setattr(os, "dup", lambda _: terminal)

    def seen() -> str:
        try:
            return os.read(reading, 65536).decode()
        except BlockingIOError:
            return ""

    yield seen
    os.close(reading)
    os.close(terminal)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets seconds pass on the line's clock."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_only_long_measurements_are_shown(screen: Callable[[], str], wait: Callable[[float], None]) -> None:
    line = ProgressLine()
    line.clear()
    line(SPEC, 0.0)
    wait(QUIET_SECONDS)
    line(SPEC, 0.2)
    assert screen() == ""
    wait(0.5)
    line(SPEC, 0.25)
    assert screen() == drawn(f"{SHOWN.format(1024)}: 25%, 0:08 left")
    wait(REDRAW_SECONDS / 2)
    line(SPEC, 0.3)
    assert screen() == "", "redrawn at once it would flicker"
    wait(REDRAW_SECONDS)
    line(SPEC, 0.5)
    assert screen() == drawn(f"{SHOWN.format(1024)}: 50%, 0:03 left")
    for expected in (CLEARED, ""):
        line.clear()
        assert screen() == expected


def test_each_measurement_is_timed_by_itself(
    screen: Callable[[], str], wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ProgressLine()
    line.stage = "test 7 of 45"
    line(SPEC, 0.0)
    wait(100)
    line(OTHER, 0.5)
    assert screen() == "", "another spec has just begun"
    wait(QUIET_SECONDS + 1)
    line(OTHER, 0.75)
    whole = f"test 7 of 45, {SHOWN.format(2048)}: 75%, 0:01 left"
    assert screen() == drawn(whole[:59]), "as much as the terminal is wide"
    monkeypatch.setenv("CI", "true")
    line = ProgressLine()
    line(SPEC, 0.0)
    wait(100)
    line(SPEC, 0.5)
    assert screen() == "", "nobody watches"


@pytest.mark.slow
def test_long_measurement_is_shown_while_it_runs(project: Project) -> None:
    """With its delays a round takes a second."""
    project.experiment.write_text(project.experiment.read_text().replace("1024", "1024, delay_seconds=0.5"))
    project.environment.pop("CI", None)
    reading, terminal = os.openpty()
    process = project.start("perf", "--rounds", "4", "--color", "no", output=terminal)
    os.close(terminal)
    written = ""
    with contextlib.suppress(OSError):  # how a terminal ends that nobody else has open
        while piece := os.read(reading, 65536).decode():
            written += piece
    os.close(reading)
    assert process.wait(timeout=HANG_SECONDS) == 0, written
    lines = re.findall(r"\x1b7\x1b\[B\r\x1b\[K([^\x1b]+)\x1b8", written)
    assert lines, written
    assert lines[-1].startswith("test 1 of 1, all_reduce world_size=2 delay_seconds=0.5"), written
    assert f"{lines[-1]}\x1b8{CLEARED}." in written, "the line is removed before the test's dot"
    project.assert_nothing_left()
