"""The README's table is made from a stored run, never typed."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.project import REPOSITORY


@pytest.fixture(scope="module")
def update_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_readme", REPOSITORY / "docs" / "update_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_table_is_what_its_run_gives(update_readme: ModuleType) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    named = update_readme.BLOCK.search(readme)
    assert named is not None
    assert "speedup" in readme[named.start() : named.end()]
    assert update_readme.updated(readme, named[2]) == readme
