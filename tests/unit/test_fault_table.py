"""The tool for faults at random moments fails if a fault is handled wrongly, and it resumes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.faults import __main__ as command
from tests.faults.outcomes import NEVER, SKIPPED, Kept, Outcome, table

GOOD = Outcome(fault="rank killed", moment="round", seconds=0.2, limit_seconds=0.5, report="was killed")
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the tool on a fault with the given outcome."""
    monkeypatch.setenv(command.OWN_MEMORY, "1")
    monkeypatch.chdir(tmp_path)

    def run(outcome: Outcome, *arguments: str) -> int:
        def happen(number: int, chance: random.Random) -> Outcome:
            return replace(outcome, number=number, report=f"{outcome.report} {chance.random():.9f}")

        monkeypatch.setattr(command, "faults", lambda ends: {outcome.fault: happen})
        return command.main(["--count", "3", "--file", str(tmp_path / "kept.jsonl"), *arguments])

    return run


def test_handled_faults_pass(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD) == 0
    *_, row, end, load = capsys.readouterr().out.splitlines()
    assert end == "0 of 3 faults were not handled as they must be"
    assert load.startswith("seed 1; load ")
    assert row.split() == ["rank", "killed", "3", "0.20", "0.20", "0.5", "3", "3", "0", "0"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (replace(GOOD, seconds=NEVER), "was not reported"),
        (replace(GOOD, seconds=0.6), "was reported after 0.60 s, not 0.5 s"),
        (replace(GOOD, is_named=False), "the report does not name the cause: 'was killed"),
        (replace(GOOD, is_next_right=False), "the next measurement failed"),
        (replace(GOOD, left=("/dev/shm/sem.x",)), "left behind: /dev/shm/sem.x"),
        (replace(GOOD, wrong="nothing was saved"), "nothing was saved"),
    ],
)
def test_each_wrong_outcome_fails(
    run: Run, wrong: Outcome, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(wrong, "--count", "1") == 1
    lines = capsys.readouterr().out.splitlines()
    assert sentence in lines[-2]
    assert lines[-3] == "1 of 1 faults were not handled as they must be"


def test_skipped_fault_shows_its_reason() -> None:
    skipped = Outcome(fault="disk full", moment=SKIPPED, report="it needs root")
    assert "disk full                skipped: it needs root" in table([skipped, GOOD])
    assert skipped.problems() == []


def test_unknown_fault_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(GOOD, "--only", "flod")
    assert "--only flod matches no fault; choose from: rank killed" in capsys.readouterr().err


def test_interrupted_run_shows_its_table(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", Mock(side_effect=KeyboardInterrupt))
    assert run(GOOD) == 130
    assert "0 of 0 faults were not handled" in capsys.readouterr().out


def test_resumed_run_has_the_same_moments(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    run(GOOD)
    whole = file.read_text()
    file.write_text(whole[: whole.index("\n") + 20])  # killed within the second line
    run(GOOD, "--resume")
    assert file.read_text() == whole
    run(GOOD, "--resume", "--seed", "2")
    assert len(Kept(file, 1, resume=True).outcomes) == 3
    assert {found.report for found in Kept(file, 2, resume=True).outcomes}.isdisjoint(
        found.report for found in Kept(file, 1, resume=True).outcomes
    )
