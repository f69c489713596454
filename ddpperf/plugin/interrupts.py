"""Ctrl-C: the first ends the measuring, further ones do not cut off the ending, which takes seconds and tells the verdict."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def interrupt_once() -> None:
    """From now on the first SIGINT raises KeyboardInterrupt, and then none does anything until the process' near end."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first)


def interrupt_no_more() -> None:
    """From now on, while what was measured is judged and saved, a first SIGINT does nothing either: that takes seconds."""
    if signal.getsignal(signal.SIGINT) is _first:
        signal.signal(signal.SIGINT, _none)


def interrupt_as_before() -> None:
    """Unless there was one that ended the measuring."""
    if signal.getsignal(signal.SIGINT) in (_first, _none):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _none(number: int, frame: FrameType | None) -> None:
    """It came too late."""
