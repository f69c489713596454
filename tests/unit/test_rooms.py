"""docs/reading-the-code.md names every room of the code."""

from __future__ import annotations

import re

from tests.project import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reading-the-code.md").read_text()


def test_table_names_every_room() -> None:
    inner = (REPOSITORY / "ddpperf").glob("[!_]*")
    rooms = {path.name for path in inner if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert set(re.findall(r"^\| `ddpperf/(\w+(?:\.py)?)/?` \|", PAGE, re.MULTILINE)) == rooms


def test_table_names_every_folder_of_tests() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "tests").glob("*/*.py")}
    assert set(re.findall(r"^\| `tests/(\w+)/` \|", PAGE, re.MULTILINE)) == folders
