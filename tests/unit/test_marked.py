"""How tests find what their processes left in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import tempfile

import pytest

from ddpperf.io.private_folders import PREFIX, SHARED_MEMORY, PrivateFolder
from tests.project import TEMPORARY, Marked, unmapped

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason=f"there is no {SHARED_MEMORY}")


def names() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"sem.{PREFIX}")}


def test_semaphore_of_the_process_that_made_it_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has mapped it under the name that it had before it was whole."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "semprefix", f"/{PREFIX}{os.getpid()}")
    semaphore = multiprocessing.get_context("spawn").Lock()
    made = f"sem.{semaphore._semlock.name[1:]}"  # type: ignore[attr-defined]
    assert made in names()
    assert unmapped({made}) == set()


def test_only_this_tests_shared_memory_is_left(marked: Marked) -> None:
    """Another test's folder says that shared memory is of that test, wherever this test's files are."""
    assert tempfile.gettempdir() == str(marked.folder)
    mine = Marked()
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as other, PrivateFolder(other) as folder:
        of_other, of_nobody = (SHARED_MEMORY / f"sem.{name}-1" for name in (folder.name, f"{PREFIX}nobody"))
        try:
            of_other.touch()
            of_nobody.touch()
            assert mine.shared_memory() == {of_nobody.name}
        finally:
            of_nobody.unlink()
            mine.clean()
    assert not of_other.exists()
