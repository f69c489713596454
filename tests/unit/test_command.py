"""What all commands have in common."""

from __future__ import annotations

import pytest

from ddpperf.command import print_lines


def test_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no sys.stdout if the shell closed it, as with `>&-`."""
    monkeypatch.setattr("sys.stdout", None)
    print_lines(["a line"])
