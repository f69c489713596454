"""Which code was measured, and that the base of a comparison with a stored run is the same."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.git import commit
from ddpperf.plugin.base_checkout import require_stored_code
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import Baseline
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.interpreter import Found, Side


def git(root: Path, *arguments: str) -> str:
    who = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    ]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_named_by_its_hash(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert commit(tmp_path) == "nogit"  # no commit yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is no hash")
    short = git(tmp_path, "rev-parse", "--short=9", "HEAD")
    assert commit(tmp_path) == short
    (tmp_path / ".gitignore").write_text("ignored\n")
    assert commit(tmp_path) == short, "an untracked file"
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "--amend", "--no-edit")
    (tmp_path / "ignored").write_text("a run's own file")
    amended = git(tmp_path, "rev-parse", "--short=9", "HEAD")
    assert commit(tmp_path) == amended != short
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{amended}+"


def test_a_folder_without_git_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) == "nogit"
    assert commit(tmp_path / "gone") == "nogit"


# --- the base's


def made(root: Path) -> None:
    """A repository of one commit."""
    git(root, "init")
    (root / "mine.py").write_text("one")
    git(root, "add", "mine.py")
    git(root, "commit", "-m", "one")


def stored(commit: str, torch: str = "2.11.0") -> Baseline:
    sample = Sample(set="A1", side="A", torch=torch, seconds=((0.1,),))
    one = Measured(spec=AllReduceSpec(world_size=2, nbytes=1024), iterations=1, samples=(sample,))
    return Baseline(path=Path("runs/0007_main.json"), measured={"t": one}, when="", commit=commit)


def base(root: Path | None, torch: str = "2.11.0") -> Sides:
    """With another interpreter, so that the base is not the candidate."""
    return Sides(
        base=Side(name="A", root=root, python="other"),
        candidate=Side(name="B"),
        spec_fields={},
        found={"A": Found(python="3.11", torch=torch)} if torch else {},
    )


def test_the_base_is_the_code_that_was_stored(tmp_path: Path) -> None:
    made(tmp_path)
    was = commit(tmp_path)
    require_stored_code(stored(was), base(tmp_path), tmp_path)
    require_stored_code(stored(was), None, tmp_path)
    require_stored_code(stored(was), base(None), tmp_path)
    (tmp_path / "built").write_text("by whoever built it there")
    require_stored_code(stored(was), base(tmp_path), tmp_path)
    (tmp_path / "mine.py").write_text("two")
    found = (
        rf"0007_main.json was measured at commit {was}, "
        rf"but --base .* holds {was} with changes; check {was} out there"
    )
    with pytest.raises(Refused, match=found):
        require_stored_code(stored(was), base(tmp_path), tmp_path)
    git(tmp_path, "commit", "-a", "-m", "two")
    with pytest.raises(Refused, match=rf" holds (?!{was})\w+; check {was} out there$"):
        require_stored_code(stored(was), base(tmp_path), tmp_path)


def test_base_without_root_needs_the_unchanged_tree(tmp_path: Path) -> None:
    """But for the stored run, which was committed after it was measured."""
    made(tmp_path)
    was = commit(tmp_path)
    (tmp_path / "perf" / "baselines").mkdir(parents=True)
    (tmp_path / "perf" / "baselines" / "0007_main.json").write_text("{}")
    git(tmp_path, "add", "perf")
    git(tmp_path, "commit", "-m", "a baseline")
    for the_base in (base(None), base(tmp_path)):
        require_stored_code(stored(was), the_base, tmp_path)
    require_stored_code(stored("0123456789"), base(None), tmp_path)
    (tmp_path / "mine.py").write_text("two")
    sentence = (
        f" at commit {was}, but this tree, which the base runs, differs from it; "
        f"check {was} out elsewhere, and name that folder"
    )
    for _ in ("with changes", "committed"):
        with pytest.raises(Refused, match=f"^0007_main.json was measured{sentence} with --base$"):
            require_stored_code(stored(was), base(None), tmp_path)
        git(tmp_path, "commit", "-a", "--allow-empty", "-m", "two")


@pytest.mark.parametrize("named", [True, False])
def test_commit_of_a_changed_tree_counts(tmp_path: Path, named: bool) -> None:
    made(tmp_path)
    was, the_base = commit(tmp_path), base(tmp_path if named else None)
    require_stored_code(stored(f"{was}+"), the_base, tmp_path)
    (tmp_path / "mine.py").write_text("two")
    require_stored_code(stored(f"{was}+"), the_base, tmp_path)
    git(tmp_path, "commit", "-a", "-m", "two")
    with pytest.raises(Refused, match=rf"was measured at commit {was}\+, .*; check {was} out "):
        require_stored_code(stored(f"{was}+"), the_base, tmp_path)


def sides(candidate: Side, root: Path | None, python: str = sys.executable) -> Sides:
    return Sides(base=Side(name="A", root=root, python=python), candidate=candidate, spec_fields={})


def test_a_base_that_is_the_candidate_clears_nothing(tmp_path: Path) -> None:
    """By whatever name: this tree, or another link to this interpreter beside it."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "python3").symlink_to(sys.executable)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "python").symlink_to(sys.executable)
    here = Side(name="B", python=str(tmp_path / "python"))
    for same in (
        sides(here, None, str(tmp_path / "python")),
        sides(here, tmp_path, str(tmp_path / "python")),
        sides(here, tmp_path / "elsewhere" / "..", str(tmp_path / "python3")),
    ):
        with pytest.raises(
            Refused,
            match=r"^the base equals this environment, .* compared with themselves; name",
        ):
            require_stored_code(stored("nogit"), same, tmp_path)
        require_stored_code(
            stored("nogit"), dataclasses.replace(same, spec_fields={"execution": "graph"}), tmp_path
        )
        require_stored_code(stored("nogit"), dataclasses.replace(same, delay_seconds=0.1), tmp_path)
    require_stored_code(
        stored("nogit"), sides(here, tmp_path / "elsewhere", str(tmp_path / "python")), tmp_path
    )
    environment = str(tmp_path / "elsewhere" / "python")
    require_stored_code(stored("nogit"), sides(here, None, environment), tmp_path)


def test_slow_git_is_no_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    was = commit(tmp_path)
    (tmp_path / "mine.py").write_text("two")

    def slow(*_: object) -> str:
        raise OSError("git took longer than 10 s")

    monkeypatch.setattr("ddpperf.plugin.base_checkout.git", slow)
    require_stored_code(stored(was), base(tmp_path), tmp_path)


@pytest.mark.parametrize("unknown", ["", "nogit", "0123456789", "0123456789+"])
def test_unknown_commits_are_not_compared(tmp_path: Path, unknown: str) -> None:
    """The code under test may lie in a repository of its own, of which the stored run tells
    nothing.
    """
    require_stored_code(stored(unknown), base(tmp_path), tmp_path)
    made(tmp_path)
    require_stored_code(stored(unknown), base(tmp_path), tmp_path)


def test_the_base_has_the_torch_that_was_stored(tmp_path: Path) -> None:
    require_stored_code(stored("nogit"), base(None, torch=""), tmp_path)
    with pytest.raises(
        Refused,
        match=r"^0007_main.json was measured with torch 2.11.0, but the base has 2.12.0; "
        r"name an interpreter with the stored run's torch",
    ):
        require_stored_code(stored("nogit"), base(None, torch="2.12.0"), tmp_path)
