"""Ctrl-C: the first ends the measuring, further ones do not cut off the ending, which takes seconds and tells the verdict."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

_ENDING = threading.Event()  # nothing ended the measuring, and nothing ends what follows


def interrupt_once(config: pytest.Config) -> None:
    """From now on the first SIGINT raises KeyboardInterrupt, and then none does anything, until pytest ends."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first)
        config.add_cleanup(interrupt_as_before)


def ignore_interrupts() -> None:
    """From now on not even the first does anything, here or in what is started: what was measured is judged and saved."""
    if signal.getsignal(signal.SIGINT) is _first:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _ENDING.set()


def interrupt_as_before() -> None:
    """Unless one ended the measuring: a process takes a while to end, and another would change its exit status."""
    if signal.getsignal(signal.SIGINT) is _first or _ENDING.is_set():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _ENDING.clear()


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
