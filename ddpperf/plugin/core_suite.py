"""The core suite: the cases that run if the command line names a folder, without --full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def outside_core(
    items: Sequence[pytest.Item], paths: Sequence[str], *, full: bool, markers: str
) -> list[pytest.Item]:
    """Return the collected tests that this run leaves out, because they are not in the core suite.

    paths: the paths of the command line, in the form of test ids. A test whose file or function is
    among them is kept. full: whether --full was given. markers: the expression of -m, which then
    selects the tests alone.
    """
    if full or markers:
        return []
    named = [path for path in paths if path.partition("::")[0].endswith(".py")]
    return [
        item
        for item in items
        if item.get_closest_marker("specs")
        and item.get_closest_marker("slow")
        and not any(is_below(item.nodeid, path) for path in named)
    ]


def by_file(tests: Sequence[str]) -> dict[str, int]:
    """Return the number of tests in each file, by the file's path."""
    return dict(Counter(test.partition("::")[0] for test in tests))


def is_below(test: str, path: str) -> bool:
    """Return whether a test id belongs to the folder, file or function that a path names."""
    return path == "" or test == path or test.startswith((f"{path}/", f"{path}::", f"{path}["))
