"""Ctrl-C, or the end of a job's time: the first ends the measuring, others do not cut off the ending, which takes seconds,
saves what was measured and tells the verdict."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

_USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_ours: set[signal.Signals] = set()  # those that are handled here until they are as before


def interrupt_once(config: pytest.Config) -> None:
    """From now on the first SIGINT or SIGTERM raises KeyboardInterrupt with its name, and then none does anything for as long
    as the process lives; whoever handles one already, or from now on, keeps it."""
    if threading.current_thread() is threading.main_thread():
        _ours.update(number for number, usual in _USUAL.items() if signal.getsignal(number) == usual)
        for number in _ours:
            signal.signal(number, _first)
        config.add_cleanup(interrupt_as_before)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt, too, so that what was begun is undone."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_interrupts() -> None:
    """From now on not even the first does anything, here or in what is started: what was measured is judged and saved."""
    for number in _ours:
        _handle(number, signal.SIG_IGN)


def interrupt_as_before() -> None:
    """Unless one ended the measuring: a process takes a while to end, and another would change its exit status."""
    for number in _ours:
        _handle(number, _USUAL[number])
    _ours.clear()


def _first(number: int, frame: FrameType | None) -> None:
    ignore_interrupts()
    _ours.clear()
    raise KeyboardInterrupt(signal.Signals(number).name)


def _handle(number: signal.Signals, how: Any) -> None:
    """Unless somebody else has come to handle it."""
    if signal.getsignal(number) in (_first, signal.SIG_IGN):
        signal.signal(number, how)
