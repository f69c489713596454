"""The experiments of perf/ with their specs markers, collected without pytest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import perf


def experiments() -> Iterator[tuple[str, str, pytest.Mark]]:
    """Yield the module, the name and the specs marker of each test in perf/."""
    for path in sorted(Path(perf.__path__[0]).glob("test_*.py")):
        module = importlib.import_module(f"perf.{path.stem}")
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "specs":
                    yield path.stem, name, mark
