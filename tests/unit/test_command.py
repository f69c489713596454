"""The output of commands, in this process."""

from __future__ import annotations

import io
import sys

import pytest

from ddpperf.io.command import print_lines


def test_output_is_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_lines(["caf\u00e9", "a name that is no text: \udcff"])
    assert written.getvalue() == b"caf\xc3\xa9\na name that is no text: \\udcff\n"


def test_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python does after >&-
    print_lines(["a line"])
