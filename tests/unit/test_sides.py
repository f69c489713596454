"""The sides of an A/B run: what the options make of them, and refusals."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.workers.interpreter import Side
from tests.command_line import reader

pytest_plugins = ["pytester"]

HERE = Side(name="A")
Read = Callable[[str], Any]


@pytest.fixture
def read(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> Read:
    """Return the sides of a command line, in a folder with checkouts and interpreters."""
    for name in ("good", "plain", "bare/bin", "other/bin"):
        (pytester.path / name).mkdir(parents=True)
    for name in ("text", "bare/bin/python"):
        (pytester.path / name).touch()
    (pytester.path / "bare/bin/python").chmod(0o755)
    (pytester.path / "other/bin/python").symlink_to(sys.executable)

    read = reader(pytestconfig)
    return lambda line: read("--rootdir", str(pytester.path), *shlex.split(line)).sides


def test_both_sides_can_run_here(read: Read) -> None:
    sides = read(f"--candidate {sys.executable} --candidate comm_hook=bf16")
    assert (sides.base, sides.candidate) == (HERE, Side(name="B"))
    assert sides.spec_fields == {"comm_hook": "bf16"}


def test_link_to_an_interpreter_stays_a_link(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(Path("other/bin/python").absolute())
    assert read("--candidate other/bin/python").candidate == Side(name="B", python=python)
    monkeypatch.setenv("PATH", f"other/bin{os.pathsep}{os.environ['PATH']}")
    assert read("--candidate python").candidate == Side(name="B", python=python)


@pytest.mark.parametrize(
    ("line", "base", "candidate"),
    [
        ("--candidate bare/bin/python --candidate ./plain/../good", "{here} None", "{bare} {at}/good"),
        ("--base {bare} --base good", "{bare} {at}/good", "{here} None"),
        ("--base good --candidate {at}/plain", "{here} {at}/good", "{here} {at}/plain"),
    ],
)
def test_folder_is_a_source_tree_and_executable_an_interpreter(
    read: Read, pytester: pytest.Pytester, line: str, base: str, candidate: str
) -> None:
    at = pytester.path
    words = {"at": at, "bare": at / "bare" / "bin" / "python", "here": sys.executable}
    sides = read(line.format(**words))
    assert (sides.base.name, sides.candidate.name) == ("A", "B")
    for side, named in ((sides.base, base), (sides.candidate, candidate)):
        assert f"{side.python} {side.root}" == named.format(**words)
        assert side.environment == {}


def test_capitals_are_variables_and_other_names_fields(read: Read, pytester: pytest.Pytester) -> None:
    named = "good", "NCCL_ALGO=Ring=Tree", "A=", "bucket_cap_mb=4", "strategy=zero1", "static_graph=true"
    sides = read("--base NCCL_ALGO=Tree " + " ".join(f"--candidate {value}" for value in named))
    candidate = Side(name="B", root=pytester.path / "good", environment={"NCCL_ALGO": "Ring=Tree", "A": ""})
    assert sides.base == Side(name="A", environment={"NCCL_ALGO": "Tree"})
    assert sides.candidate == candidate
    assert sides.spec_fields == {"bucket_cap_mb": 4, "static_graph": True, "strategy": "zero1"}


def test_delay_is_a_field_of_the_tests_own_spec(pytestconfig: pytest.Config) -> None:
    options = reader(pytestconfig)("--rootdir=/", "--spec=delay_seconds=1", "--candidate=delay_seconds=2")
    own = options.step(world_size=2, per_rank_batch_size=8, delay_seconds=options.delay_seconds)
    sides = options.sides
    assert sides is not None
    assert own.delay_seconds == 1
    assert sides.candidate_of(own, own=True) == replace(own, delay_seconds=2)
    assert sides.candidate_of(own, own=False) is None, "a reference is not delayed"


# --- refusals

TAKES = "takes a folder, an interpreter, NAME=value or field=value, got"
REFUSALS = {
    "--base nowhere": f"--base {TAKES} 'nowhere'",
    "--base good --base plain": "--base takes a name once, got one of source tree twice; drop one",
    "--candidate A=1 --candidate A=2": "--candidate takes a name once, got one of A twice; drop one",
    "--base comm_hook=bf16": "--base takes no training field, got comm_hook; pass --spec or --candidate",
    "--candidate comm_hok=bf16": "takes the fields strategy, .*, execution, or a variable in capitals, got",
    "--candidate execution=x": "execution must be one of eager, compile, graph, compile.graph, got 'x'",
    "--candidate RANK=1": "--candidate takes no RANK, which ddpperf sets for every rank, got 'RANK=1'",
}


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: line[:60])
def test_wrong_side_is_refused_with_one_sentence(read: Read, line: str) -> None:
    with pytest.raises((pytest.UsageError, Refused), match=REFUSALS[line]):
        read(line)
