"""The README's tables are made from stored runs, never typed."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.project import REPOSITORY, script


@pytest.fixture(scope="module")
def update_readme() -> ModuleType:
    return script("update_readme")


def test_the_readmes_tables_are_what_their_runs_give(update_readme: ModuleType) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    blocks = list(update_readme.BLOCK.finditer(readme))
    assert len({update_readme.folder_of(block[1]) for block in blocks}) == len(blocks) == 2
    assert all("speedup" in block[0] for block in blocks)
    assert len(update_readme.VERSUS.findall(readme)) == 1
    for page in update_readme.PAGES:
        text = page.read_text()
        assert update_readme.updated(text, {}) == text
