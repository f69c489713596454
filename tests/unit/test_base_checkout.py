"""Git: the commit of a tree, its checkout beside the tree, and the stored run's code as a base."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.io import private_folders
from ddpperf.machine.git import check_out, commit, remove_worktree, without_commit
from ddpperf.plugin.base_checkout import require_stored_code, stored_sides
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.results.samples import BASE, Measured, Sample
from ddpperf.results.stored_runs import Baseline
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.interpreter import Found, Side
from tests.project import REPOSITORY, git

TORCH = "2.11.0"
OPTIONS: Any = SimpleNamespace(device="cpu", model="resnet18", functions=())


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
        commit_all(root, content)
    return root


def old(root: Path) -> str:
    return git(root, "rev-parse", "--short=9", "HEAD~1")


def commit_all(root: Path, message: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", message)


def worktrees(root: Path) -> int:
    return len(git(root, "worktree", "list").splitlines())


def place(root: Path) -> Path:
    return root / ".ddpperf" / "base" / "x"


# --- git


def test_a_commit_is_named_by_its_hash(repository: Path) -> None:
    git(repository, "tag", "-a", "v1", "-m", "a tag is no hash")
    short = git(repository, "rev-parse", "--short=9", "HEAD")
    (repository / "untracked").write_text("does not count")
    assert commit(repository) == short
    (repository / "mine.py").write_text("two")
    assert commit(repository) == f"{short}+"


def test_a_folder_without_git_has_no_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(tmp_path) == commit(tmp_path / "gone") == "nogit"
    monkeypatch.setenv("PATH", "")
    assert commit(repository) == "nogit"
    with pytest.raises(OSError, match="'git'"):
        check_out(repository, "123456789", place(repository))


def test_change_that_status_leaves_out_counts(repository: Path) -> None:
    clean = commit(repository)
    for flag in ("skip-worktree", "assume-unchanged"):
        git(repository, "update-index", f"--{flag}", "mine.py")
        assert commit(repository) == clean
        (repository / "mine.py").write_text("mine alone")
        assert commit(repository) == f"{clean}+", flag
        (repository / "mine.py").write_text("new")
        git(repository, "update-index", f"--no-{flag}", "mine.py")


def test_status_that_fails_is_the_reason(repository: Path) -> None:
    """As in a clone with files of Git LFS, where it is not installed."""
    git(repository, "config", "filter.lfs.clean", "git-lfs-is-not-installed")
    git(repository, "config", "filter.lfs.required", "true")
    (repository / ".git" / "info" / "attributes").write_text("mine.py filter=lfs\n")
    (repository / "mine.py").write_text("touched")
    assert commit(repository) == "nogit"
    assert "clean filter 'lfs' failed" in without_commit(repository)


def test_settings_of_git_are_kept(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_LFS_SKIP_SMUDGE", "1")
    git(repository, "config", "filter.lfs.smudge", 'test "$GIT_LFS_SKIP_SMUDGE" && cat')
    git(repository, "config", "filter.lfs.required", "true")
    (repository / ".git" / "info" / "attributes").write_text("mine.py filter=lfs\n")
    assert check_out(repository, old(repository), place(repository))


def test_commit_is_checked_out_beside_the_tree(repository: Path) -> None:
    (repository / "mine.py").write_text("not committed")
    folder = place(repository)
    assert check_out(repository, old(repository), folder) == folder
    assert (folder / "mine.py").read_text() == "old"
    assert (repository / "mine.py").read_text() == "not committed"
    assert worktrees(repository) == 2
    assert git(repository, "status", "--porcelain") == "M mine.py", "the worktree's folder is ignored"
    shutil.rmtree(folder)  # somebody has deleted the files
    assert check_out(repository, old(repository), folder) == folder
    (folder / "built").write_text("by a rank")
    remove_worktree(repository, folder)
    assert not folder.exists()
    assert worktrees(repository) == 1
    remove_worktree(repository, folder)
    root = check_out(repository / "sub", old(repository), folder)
    assert root == folder / "sub", "a folder of a repository stays that folder"
    assert (root / "mine.py").read_text() == "old"


def test_failed_checkout_leaves_no_worktree(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, folder = old(repository), place(repository)
    with pytest.raises(OSError, match="invalid reference: 123456789"):
        check_out(repository, "123456789", folder)
    git(repository, "config", "filter.slow.smudge", "sleep 60")
    (repository / ".git" / "info" / "attributes").write_text("mine.py filter=slow\n")
    monkeypatch.setattr("ddpperf.machine.git.CHECKOUT_SECONDS", 0.5)
    with pytest.raises(OSError, match=r"git took longer than 0\.5 s"):
        check_out(repository, good, folder)
    remove_worktree(repository, folder)
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
        from ddpperf.machine.git import check_out, commit, remove_worktree, without_commit
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
    check_out(repository, old(repository), place(repository))
    assert not (repository / "ran").exists()


def test_reading_does_not_lock_the_index(repository: Path) -> None:
    """`git status` would write the index anew, and a commit of the user at that moment fail."""
    (repository / "mine.py").touch()
    before = (repository / ".git" / "index").stat().st_mtime_ns
    commit(repository)
    assert (repository / ".git" / "index").stat().st_mtime_ns == before


# --- the stored run's code, checked out as the base


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
    assert (sides.found[BASE].torch, sides.found[BASE].torchvision) == (TORCH, False)
    cleanup.close()
    assert not sides.base.root.exists()
    assert worktrees(repository) == 1


def test_other_torch_needs_the_stored_interpreter(repository: Path, checked: list[Side]) -> None:
    python = repository.parent / "python"
    python.symlink_to(sys.executable)
    base = stored(old(repository), torch="2.12.0", executable=str(python))
    refused = pytest.raises(Refused, match=f"^0007_main.json measured torch 2.12.0, and {python} has {TORCH}")
    with refused, ExitStack() as cleanup:
        stored_sides(base, repository, OPTIONS, cleanup)
    assert [side.python for side in checked] == [str(python)]
    assert worktrees(repository) == 1


def test_checkout_of_a_killed_run_is_removed(repository: Path, checked: list[Side]) -> None:
    left = repository / ".ddpperf" / "base" / "ddpperf_12345678" / "abc"
    check_out(repository, old(repository), left)
    private_folders.remove_abandoned_folders.cache_clear()  # as in a new process
    with ExitStack() as cleanup:
        stored_sides(stored(old(repository), executable=sys.executable), repository, OPTIONS, cleanup)
        assert not left.parent.exists()
        assert worktrees(repository) == 2
    assert worktrees(repository) == 1


def test_code_that_cannot_be_checked_out_is_refused(repository: Path) -> None:
    with pytest.raises(Refused, match=r"cannot be checked out .*invalid ref"), ExitStack() as cleanup:
        stored_sides(stored("123456789"), repository, OPTIONS, cleanup)
    assert worktrees(repository) == 1
    assert list(repository.glob(".ddpperf/base/*")) == []


# --- the stored run's code, named by --base


def base(root: Path | None) -> Sides:
    """With another interpreter, so that the base is not the candidate."""
    found = {"A": Found(python="3.11", torch=TORCH)}
    side = Side(name="A", root=root, python="other")
    return Sides(base=side, candidate=Side(name="B"), spec_fields={}, found=found)


def test_the_base_is_the_code_that_was_stored(repository: Path) -> None:
    """Changes of what is no code, such as the promoted stored run itself, do not count."""
    was = commit(repository)
    (repository / "perf" / "baselines").mkdir(parents=True)
    (repository / "perf" / "baselines" / "0007_main.json").write_text("{}")
    commit_all(repository, "a baseline")
    (repository / "built").write_text("by whoever built it there")
    for the_base in (base(repository), base(None)):
        require_stored_code(stored(was), the_base, repository)
    (repository / "mine.py").write_text("two")
    for held in (r"\w+ with changes", r"\w+"):
        words = f"^0007_main.json was measured at commit {was}, but the base .* holds {held}; check {was} out"
        for the_base in (base(repository), base(None)):
            with pytest.raises(Refused, match=words):
                require_stored_code(stored(was), the_base, repository)
        git(repository, "commit", "-a", "--allow-empty", "-m", "two")


def test_commit_of_a_changed_tree_counts(repository: Path) -> None:
    was, the_base = commit(repository), base(repository)
    (repository / "mine.py").write_text("two")
    require_stored_code(stored(f"{was}+"), the_base, repository)
    git(repository, "commit", "-a", "-m", "two")
    with pytest.raises(Refused, match=rf"was measured at commit {was}\+, .*; check {was} out "):
        require_stored_code(stored(f"{was}+"), the_base, repository)


@pytest.mark.parametrize("unknown", ["", "nogit", "0123456789", "0123456789+"])
def test_unknown_commits_are_not_compared(repository: Path, unknown: str) -> None:
    """The code under test may lie in a repository of its own."""
    require_stored_code(stored(unknown), base(repository.parent), repository.parent)
    require_stored_code(stored(unknown), base(repository), repository)


def test_a_base_that_is_the_candidate_clears_nothing(tmp_path: Path) -> None:
    """By whatever name: this tree, or another link to this interpreter beside it."""
    here, link = (str(tmp_path / name) for name in ("python", "python3"))
    for path in (here, link):
        Path(path).symlink_to(sys.executable)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def sides(root: Path | None, python: str) -> Sides:
        side = Side(name="A", root=root, python=python)
        return Sides(base=side, candidate=Side(name="B", python=here), spec_fields={})

    for same in (sides(None, here), sides(elsewhere / "..", link)):
        with pytest.raises(Refused, match=r"^--base names the code of this run; name the code or the interp"):
            require_stored_code(stored("nogit"), same, tmp_path)
        for change in ({"spec_fields": {"execution": "graph"}}, {"spec_fields": {"delay_seconds": 0.1}}):
            require_stored_code(stored("nogit"), dataclasses.replace(same, **change), tmp_path)
    require_stored_code(stored("nogit"), sides(elsewhere, here), tmp_path)
