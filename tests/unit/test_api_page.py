"""The names on docs/api.md exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

from tests.project import REPOSITORY

PAGE = (REPOSITORY / "docs" / "api.md").read_text()
NAMES = re.findall(r"^\| `(ddpperf[\w.]*)` \|", PAGE, re.MULTILINE)
COMMANDS = re.findall(r"^\| `python -m (ddpperf[\w.]*)` \|", PAGE, re.MULTILINE)


def test_page_names_the_api() -> None:
    assert len(NAMES) > 12
    assert len(COMMANDS) > 2


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists(name: str) -> None:
    try:
        found: object = importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
    assert found.__doc__


@pytest.mark.parametrize("command", COMMANDS)
def test_public_command_explains_itself(command: str) -> None:
    ended = subprocess.run([sys.executable, "-m", command, "--help"], capture_output=True, text=True)
    assert ended.returncode == 0
    assert f"python -m {command}" in ended.stdout


def test_every_row_has_a_status() -> None:
    rows = [row.split("|") for row in PAGE.splitlines() if row.startswith("| ")]
    assert {row[-2].strip() for row in rows} == {"status", "stable", "new"}
