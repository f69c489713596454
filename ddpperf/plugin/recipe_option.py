"""The option --recipe, which selects the tests that train with the named recipes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pytest

NAMES = "pass a name in perf/recipes.toml"


def recipes_of(items: Sequence[pytest.Item]) -> set[str]:
    """Return the names of the recipes with which the collected tests train."""
    return {name for item in items for mark in item.iter_markers("recipe") for name in mark.args}


def refusal_of(items: Sequence[pytest.Item], requested: Sequence[str]) -> str:
    """Return why the collected tests cannot train with the requested recipes; empty if they can."""
    known = recipes_of(items)
    for name in requested:
        if not known:
            advice = "name perf/ or perf/test_large_batch.py"
            return f"--recipe {name!r} needs trainings, but the named files have none; {advice}"
        if name not in known:
            if not name.strip():
                return f"--recipe takes the name of a training recipe, got {name!r}; {NAMES}"
            by_letters = {recipe.lower(): recipe for recipe in sorted(known)}
            near = difflib.get_close_matches(name.lower(), by_letters, 3, cutoff=0.5)
            near = near or [letters for letters in by_letters if name.lower() in letters][:3]
            nearest = " or ".join(repr(by_letters[letters]) for letters in near)
            advice = f"pass {nearest}" if near else NAMES
            return f"--recipe {name!r} is no recipe of the named files; {advice}"
        skips = [item.get_closest_marker("skip") for item in items if name in recipes_of([item])]
        if all(skips):
            reason = next(str(mark.kwargs.get("reason", "")) for mark in skips if mark is not None)
            return f"--recipe {name!r} cannot be measured here: {reason}"
    return ""
