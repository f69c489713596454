"""Handling of Ctrl-C, SIGTERM and SIGHUP, so that an interrupted test run still saves its verdict."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import pytest

_USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,  # a closed terminal; nohup ignores it, and so do its children
}
_handled: set[signal.Signals] = set()  # signals that this module handles


def interrupt_once(config: pytest.Config) -> None:
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, and ignore later signals.

    The exception's text is the name of the signal. A signal is left alone if it has a custom handler
    or is ignored, as SIGHUP is under nohup. When pytest ends, the usual handlers are restored. After
    an interrupted run they are not, because a second signal would change the exit status.
    """
    if threading.current_thread() is threading.main_thread() and not _handled:
        _handled.update(number for number, usual in _USUAL.items() if signal.getsignal(number) == usual)
        _handle_all(_first)
        config.add_cleanup(_restore)


def ignore_interrupts() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on, so that results are compared and saved."""
    _handle_all(signal.SIG_IGN)


def _handle_all(handler: Any) -> None:
    for number in _handled:
        signal.signal(number, handler)


def _first(number: int, frame: FrameType | None) -> None:
    ignore_interrupts()
    _handled.clear()  # so that _restore changes nothing
    raise KeyboardInterrupt(signal.Signals(number).name)


def _restore() -> None:
    for number in _handled:
        signal.signal(number, _USUAL[number])
    _handled.clear()
