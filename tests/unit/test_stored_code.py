"""The stored run's code: checked out in a git worktree of its own, and removed again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.git import check_out, commit, remove_worktree
from ddpperf.plugin.base_checkout import stored_sides
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import Baseline
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.interpreter import Found, Side
from tests.project import REPOSITORY, full_disk

TORCH = "2.11.0"
OPTIONS: Any = SimpleNamespace(device="cpu", model="resnet18", functions=())


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository whose first commit holds "old", and whose files hold "new"."""
    root = tmp_path / "repository"
    (root / "sub").mkdir(parents=True)
    git(root, "init", "--quiet")
    (root / ".gitignore").write_text(".ddpperf/\n")
    for content in ("old", "new"):
        for path in (root / "mine.py", root / "sub" / "mine.py"):
            path.write_text(content)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", content)
    return root


def old(root: Path) -> str:
    return git(root, "rev-parse", "--short=9", "HEAD~1")


def worktrees(root: Path) -> int:
    return len(git(root, "worktree", "list").splitlines())


# --- git


def test_commit_is_checked_out_beside_the_tree(repository: Path) -> None:
    (repository / "mine.py").write_text("not committed")
    folder = repository / ".ddpperf" / "base" / "x"
    assert check_out(repository, old(repository), folder) == folder
    assert (folder / "mine.py").read_text() == "old"
    assert (repository / "mine.py").read_text() == "not committed"
    assert worktrees(repository) == 2
    assert git(repository, "status", "--porcelain") == "M mine.py", "the worktree's folder is ignored"


def test_folder_of_a_repository_stays_that_folder(repository: Path) -> None:
    folder = repository / ".ddpperf" / "base" / "x"
    root = check_out(repository / "sub", old(repository), folder)
    assert root == folder / "sub"
    assert (root / "mine.py").read_text() == "old"


def test_worktree_is_removed_with_its_files(repository: Path) -> None:
    folder = repository / ".ddpperf" / "base" / "x"
    check_out(repository, old(repository), folder)
    (folder / "mine.py").write_text("changed")
    (folder / "built").write_text("by a rank")
    remove_worktree(repository, folder)
    assert not folder.exists()
    assert worktrees(repository) == 1
    remove_worktree(repository, folder)


def test_worktree_of_a_killed_run_is_replaced(repository: Path) -> None:
    folder = repository / ".ddpperf" / "base" / "x"
    check_out(repository, old(repository), folder)
    for path in sorted(folder.rglob("*"), reverse=True):  # as if somebody had deleted the files
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert check_out(repository, old(repository), folder) == folder
    assert (folder / "mine.py").read_text() == "old"


def test_unknown_commit_is_no_worktree(repository: Path) -> None:
    folder = repository / ".ddpperf" / "base" / "x"
    with pytest.raises(OSError, match="invalid reference: 123456789"):
        check_out(repository, "123456789", folder)
    assert not folder.exists()
    assert worktrees(repository) == 1


def test_folder_without_git_is_no_worktree(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a git repository"):
        check_out(tmp_path, "123456789", tmp_path / "base" / "x")
    assert not (tmp_path / "base" / "x").exists()


def test_missing_git_is_no_worktree(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commit = repository / ".ddpperf" / "base" / "x", old(repository)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="'git'"):
        check_out(repository, commit, folder)


def test_file_in_place_of_the_folder_is_kept(repository: Path) -> None:
    (repository / ".ddpperf").mkdir()
    (repository / ".ddpperf" / "base").touch()
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        check_out(repository, old(repository), repository / ".ddpperf" / "base" / "x")
    assert (repository / ".ddpperf" / "base").is_file()
    assert worktrees(repository) == 1


def test_full_disk_leaves_no_worktree(repository: Path) -> None:
    (repository / "large").write_bytes(os.urandom(100_000))
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "large")
    folder = repository / ".ddpperf" / "base" / "x"
    with full_disk(), pytest.raises(OSError, match=r"\w"):
        check_out(repository, "HEAD", folder)
    assert not folder.exists()
    assert worktrees(repository) == 1


def test_slow_checkout_is_given_up(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commit = repository / ".ddpperf" / "base" / "x", old(repository)
    git(repository, "config", "filter.slow.smudge", "sleep 60")
    (repository / ".git" / "info" / "attributes").write_text("mine.py filter=slow\n")
    monkeypatch.setattr("ddpperf.machine.git.CHECKOUT_SECONDS", 0.5)
    with pytest.raises(OSError, match=r"git took longer than 0\.5 s"):
        check_out(repository, commit, folder)
    assert not folder.exists()
    assert worktrees(repository) == 1


def hook(repository: Path, name: str, script: str) -> None:
    path = repository / ".git" / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("arguments", [[], ["-a"], ["mine.py"]], ids=["staged", "all", "path"])
def test_checkout_in_a_hook_leaves_the_commit_alone(repository: Path, arguments: list[str]) -> None:
    """Git gives its hooks the index of the commit in GIT_INDEX_FILE."""
    code = f"""if True:
        from pathlib import Path
        from ddpperf.machine.git import check_out, commit, remove_worktree
        root, folder = Path("{repository}"), Path("{repository}/.ddpperf/base/x")
        check_out(root, "{old(repository)}", folder)
        assert commit(folder) == "{old(repository)}" != commit(root)
        remove_worktree(root, folder)"""
    script = repository.parent / "compare.py"
    script.write_text(code)
    hook(repository, "pre-commit", f"PYTHONPATH={REPOSITORY} exec {sys.executable} {script}")
    (repository / "mine.py").write_text("staged")
    git(repository, "add", "mine.py")
    (repository / "sub" / "mine.py").write_text("not staged")
    git(repository, "commit", "-m", "mine", *arguments)
    assert git(repository, "show", "HEAD:mine.py") == "staged"
    every = "-a" in arguments
    assert git(repository, "show", "HEAD:sub/mine.py") == ("not staged" if every else "new")
    assert git(repository, "status", "--porcelain") == ("" if every else "M sub/mine.py")
    assert (repository / "sub" / "mine.py").read_text() == "not staged"
    assert worktrees(repository) == 1


def test_checkout_runs_no_hook_of_the_user(repository: Path) -> None:
    hook(repository, "post-checkout", f"touch {repository}/ran")
    check_out(repository, old(repository), repository / ".ddpperf" / "base" / "x")
    assert not (repository / "ran").exists()


def test_other_worktrees_are_not_forgotten(repository: Path, tmp_path: Path) -> None:
    """A worktree on a drive that is not mounted is missing only for now."""
    git(repository, "worktree", "add", "--detach", str(tmp_path / "drive"))
    (tmp_path / "drive").rename(tmp_path / "elsewhere")
    folder = repository / ".ddpperf" / "base" / "x"
    check_out(repository, old(repository), folder)
    remove_worktree(repository, folder)
    assert worktrees(repository) == 2


def test_reading_does_not_lock_the_index(repository: Path) -> None:
    """`git status` would write the index anew, and a commit of the user at that moment fail."""
    (repository / "mine.py").touch()
    before = (repository / ".git" / "index").stat().st_mtime_ns
    commit(repository)
    assert (repository / ".git" / "index").stat().st_mtime_ns == before


# --- the base of a stored run


def stored(commit: str, torch: str = TORCH, **environment: str) -> Baseline:
    sample = Sample(set="A1", side="A", torch=torch, seconds=((0.1,),))
    one = Measured(spec=AllReduceSpec(world_size=2, nbytes=1024), iterations=1, samples=(sample,))
    path = Path("runs/0007_main.json")
    return Baseline(path=path, measured={"t": one}, when="", commit=commit, environment=environment)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    """Return the sides that were tried, which have the torch of `TORCH`, as this interpreter has."""
    sides: list[Side] = []

    def check(side: Side, *_: str) -> Found:
        sides.append(side)
        return Found(python="", torch=TORCH, torchvision=False)

    monkeypatch.setattr("ddpperf.plugin.base_checkout.check_side", check)
    monkeypatch.setattr("ddpperf.plugin.base_checkout.version", lambda _: f"{TORCH}+cpu")
    return sides


def test_base_runs_the_stored_commit(repository: Path, checked: list[Side]) -> None:
    cleanup = ExitStack()
    sides = stored_sides(stored(old(repository), executable="/other/python"), repository, OPTIONS, cleanup)
    assert checked == [sides.base]
    assert sides.base.root is not None
    assert (sides.base.root / "mine.py").read_text() == "old"
    assert sides.base.python == sys.executable, "which has the stored torch"
    assert (sides.candidate.root, sides.candidate.python) == (None, sys.executable)
    assert (sides.base_torch, sides.torchvision) == (TORCH, False)
    cleanup.close()
    assert not sides.base.root.exists()
    assert worktrees(repository) == 1


def test_other_torch_needs_the_stored_interpreter(
    repository: Path, checked: list[Side], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    base = stored(old(repository), torch="2.12.0", executable=str(python))
    refused = pytest.raises(
        Refused, match=rf"^0007_main.json measured torch 2.12.0, and {python} has {TORCH}"
    )
    with refused, ExitStack() as cleanup:
        stored_sides(base, repository, OPTIONS, cleanup)
    assert [side.python for side in checked] == [str(python)]
    assert worktrees(repository) == 1


def test_refused_base_leaves_no_worktree(
    repository: Path, checked: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Found:
        raise Refused("the code of 0007_main.json cannot import torch")

    monkeypatch.setattr("ddpperf.plugin.base_checkout.check_side", refuse)
    with pytest.raises(Refused, match="cannot import torch"), ExitStack() as cleanup:
        stored_sides(stored(old(repository)), repository, OPTIONS, cleanup)
    assert worktrees(repository) == 1
    assert list(repository.glob(".ddpperf/base/*")) == []


def test_code_that_was_never_checked_out_is_no_error(repository: Path) -> None:
    with pytest.raises(Refused, match="does not say which commit"), ExitStack() as cleanup:
        stored_sides(stored("nogit"), repository, OPTIONS, cleanup)
    assert worktrees(repository) == 1
