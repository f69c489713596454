"""The PYTHONPATH of child processes that import this ddpperf."""

from __future__ import annotations

import os

import pytest

from ddpperf.machine.child_process import package_path
from tests.project import REPOSITORY


@pytest.mark.parametrize("inherited", [None, "", "/one", "/one:/two"])
def test_child_path_has_no_empty_entry(inherited: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry, such as one after a trailing colon, would stand for the current folder."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited is not None:
        monkeypatch.setenv("PYTHONPATH", inherited)
    first, *others = package_path().split(os.pathsep)
    assert first == str(REPOSITORY)
    assert others == (inherited.split(os.pathsep) if inherited else [])
