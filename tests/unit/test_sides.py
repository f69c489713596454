"""The sides of an A/B run: what the options make of them, and refusals."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.plugin.options.read import read_options
from ddpperf.plugin.options.sides import is_elsewhere
from ddpperf.workers.interpreter import Side
from ddpperf.workers.rank_process import RankProcess
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


def test_without_an_option_there_are_no_sides(read: Read) -> None:
    assert read("") is None


@pytest.mark.parametrize("line", [f"--against {sys.executable}", "--against-spec comm_hook=bf16"])
def test_both_sides_can_run_here(read: Read, line: str) -> None:
    sides = read(line)
    assert (sides.base, sides.candidate, sides.here) == (HERE, Side(name="B"), "A")
    assert not is_elsewhere(sides.base)
    assert not is_elsewhere(sides.candidate)
    assert sides.spec_fields == ({"comm_hook": "bf16"} if "spec" in line else {})


def test_link_to_an_interpreter_stays_a_link(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(Path("other/bin/python").absolute())
    assert read("--against other/bin/python").candidate == Side(name="B", python=python)
    monkeypatch.setenv("PATH", f"other/bin{os.pathsep}{os.environ['PATH']}")
    assert read("--against python").candidate == Side(name="B", python=python)


@pytest.mark.parametrize(
    ("line", "base", "candidate", "here"),
    [
        ("--against bare/bin/python --against-root ./plain/../good", "{here} None", "{bare} {at}/good", "A"),
        ("--baseline-python {bare} --baseline-root good", "{bare} {at}/good", "{here} None", "B"),
        ("--baseline-root good --against-root {at}/plain", "{here} {at}/good", "{here} {at}/plain", "A"),
    ],
)
def test_sides_have_their_options(
    read: Read, pytester: pytest.Pytester, line: str, base: str, candidate: str, here: str
) -> None:
    at = pytester.path
    words = {"at": at, "bare": at / "bare" / "bin" / "python", "here": sys.executable}
    sides = read(line.format(**words))
    assert (sides.base.name, sides.candidate.name, sides.here) == ("A", "B", here)
    for side, named in ((sides.base, base), (sides.candidate, candidate)):
        assert f"{side.python} {side.root}" == named.format(**words)
        assert side.environment == {}


def test_variables_and_fields_are_the_candidates(read: Read, pytester: pytest.Pytester) -> None:
    fields = "bucket_cap_mb=4", "strategy=zero1", "static_graph=true"
    sides = read(
        "--against-root good --against-env NCCL_ALGO=Ring=Tree --against-env A= "
        + " ".join(f"--against-spec {field}" for field in fields)
    )
    candidate = Side(name="B", root=pytester.path / "good", environment={"NCCL_ALGO": "Ring=Tree", "A": ""})
    assert (sides.base, sides.candidate) == (HERE, candidate)
    assert sides.spec_fields == {"bucket_cap_mb": 4, "static_graph": True, "strategy": "zero1"}


# --- refusals

PYTHON = "takes a Python interpreter, got"
FOLDER = "takes a folder, a checkout of the code under test, got"
VARIABLE = "takes NAME=VALUE, got"
REFUSALS = {
    "--against bin/python9": f"--against: {PYTHON} 'bin/python9', which does not exist; pass for example",
    "--against python9": f"--against: {PYTHON} 'python9', which is not on PATH; pass",
    "--against ''": f"--against: {PYTHON} '', which is not on PATH; pass",
    "--against bare": f"--against: {PYTHON} 'bare', which is a folder; pass for example /nightly/bin/python",
    "--against /dev/null": f"--against: {PYTHON} '/dev/null', which is not a file; pass",
    "--baseline-python ./text": f"--baseline-python: {PYTHON} './text', which is not executable; pass",
    "--against-root nowhere": (
        f"--against-root: {FOLDER} 'nowhere', which is not a folder; pass for example ../main"
    ),
    "--against-root ''": f"--against-root: {FOLDER} '', which is not a folder; pass",
    "--against-root " + "x" * 5000: (
        rf"--against-root: {FOLDER} '{'x' * 22}\.\.\.{'x' * 23}', which is not a folder"
    ),
    "--baseline-root text": f"--baseline-root: {FOLDER} 'text', which is not a folder; pass",
    "--against-env A": f"--against-env: {VARIABLE} 'A'; pass for example NCCL_ALGO=Ring",
    "--against-env 'A B=1'": f"--against-env: {VARIABLE} 'A B=1'; pass",
    "--against-env A=1 --against-env A=2": "--against-env sets A twice, got 1 and 2; set it once",
    "--against-env GLOO_SOCKET_IFNAME=lo": (
        "--against-env GLOO_SOCKET_IFNAME=lo changes nothing: the base has it, too; pass"
    ),
    "--against-env OMP_NUM_THREADS=2": (
        "which sets OMP_NUM_THREADS, a variable that ddpperf sets for every rank; pass"
    ),
    "--against-env RANK=1": "which sets RANK, a variable that",
    "--against-env LOCAL_RANK=1": "which sets LOCAL_RANK, a variable that",
    "--against-env TMPDIR=/tmp": "which sets TMPDIR, a variable that",
    "--against-env DDPPERF_MODEL=a:b": "which sets DDPPERF_MODEL, a variable that",
    "--against-spec model=x": (
        "takes FIELD=VALUE, got 'model=x', which sets none of strategy, .*, inductor, execution; pass for"
    ),
    "--against-spec execution=x": (
        "--against-spec: execution takes eager, compile, graph or compile.graph, got 'x'; pass"
    ),
    "--against-spec execution=eager --against-spec execution=graph": (
        "--against-spec sets execution twice, got eager and"
    ),
    "--against-spec inductor=a --against-spec inductor=b": (
        "--against-spec sets inductor twice, got a and b; set it once"
    ),
    "--against-spec static_graph=2": "--against-spec: static_graph takes true or false, got '2'; pass",
}


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: line[:60])
def test_wrong_side_is_refused_with_one_sentence(read: Read, line: str) -> None:
    with pytest.raises((pytest.UsageError, Refused), match=REFUSALS[line]):
        read(line)


def test_root_among_the_values_is_refused(pytester: pytest.Pytester) -> None:
    (pytester.path / "project" / "perf").mkdir(parents=True)
    (pytester.path / "other").mkdir()
    (pytester.path / "other" / "pytest.ini").write_text("[pytest]\n")
    config = pytester.parseconfig("-p", "ddpperf.plugin", "--against-root", "other", "project/perf")
    assert config.rootpath != pytester.path / "project"
    config.option.rootdir = config.option.inifilename = None
    with pytest.raises(Refused, match=re.escape("first, and write options with =, as --against-root=DIR")):
        read_options(config, 0)


def test_missing_source_tree_starts_no_rank(tmp_path: Path) -> None:
    """As on another node, where the rank would otherwise import the installed code."""
    side, log = Side(root=tmp_path / "gone"), tmp_path / "log"
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(FileNotFoundError, match=r"no such source tree on this node: '.*/gone'"):
        RankProcess(0, theirs, node_rank=0, device="cpu", side=side, log=log, folder=tmp_path)
    assert not log.exists()
