"""Check what a rank has answered, before anything uses it.

A rank runs the user's model, and perhaps another version of ddpperf. Unknown fields are ignored,
because a newer version may send them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpperf.errors import quoted
from ddpperf.workers.channel import Message

MOST = 1e300  # of a number: far from where floats overflow


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def _is_duration(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_port(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value < 2**16)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("torch"), str)


_NUMBER = "a number", _is_number
_NUMBERS = "numbers by name", _are_numbers
_TEXT = "a text", _is_text
_FLAG = "true or false", _is_flag
_Kind = tuple[str, Callable[[Any], bool]]
ERROR: Mapping[str, _Kind] = {"summary": _TEXT, "traceback": _TEXT, "distributed": _FLAG}
NEEDED: Mapping[str, Mapping[str, _Kind]] = {  # the fields of the answer to a command
    "setup": {"port": ("a port or null", _is_port), "environment": ("versions", _is_environment)},
    "open": {"max_iterations": ("a number above 0", lambda value: _is_number(value) and value >= 1)},
    "sample": {"seconds": ("a number of at least 0", _is_duration)},
    "finish": {"counters": _NUMBERS},
    "close": {"counters": _NUMBERS},
}
OPTIONAL: Mapping[str, _Kind] = {
    "kernels": _TEXT,
    "can_skip_untimed": _FLAG,
    "can_finish": _FLAG,
    "limit": _FLAG,
}


def problem_of(command: str, answer: Message) -> str:
    """Return what is wrong with the answer to a command, or an empty string."""
    if "progress" in answer:
        return _problem({"progress": _NUMBER}, answer)
    if "error" in answer:
        error = answer["error"]
        if not isinstance(error, dict):
            return f"error must be an object, got {quoted(error)}"
        return _problem(ERROR, error)
    return _problem(NEEDED.get(command, {}), answer)


def _problem(needed: Mapping[str, _Kind], found: Message) -> str:
    for name, (words, is_right) in needed.items():
        if name not in found:
            return f"{name} is missing"
        if not is_right(found[name]):
            return f"{name} must be {words}, got {quoted(found[name])}"
    for name, (words, is_right) in OPTIONAL.items():
        if name in found and not is_right(found[name]):
            return f"{name} must be {words}, got {quoted(found[name])}"
    return ""
