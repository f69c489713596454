"""The search for the first bad commit or version, with simulated measurements, and its refusals."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ddpperf import bisect
from ddpperf.history.bisection import Comparisons, Stage, first_bad
from ddpperf.history.versions import (
    MOST_ENVIRONMENTS,
    Candidates,
    CannotMeasure,
    days_between,
    environment,
    listed,
)
from ddpperf.machine.device_lock import lock_devices
from ddpperf.results.stored_runs import Storage, read_document
from tests.package_index import add_wheel
from tests.project import REPOSITORY, git

COUNT = 16  # commits after the good one


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Candidates]:
    """Versions 0 to 16 of something, which are never installed."""
    names = [f"x=={number}" for number in range(COUNT + 1)]
    with ExitStack() as cleanup:
        yield listed(names, tmp_path / "tree", tmp_path, cleanup)


def simulated(
    generator: np.random.Generator, culprit: int, size: float, noise: float
) -> Callable[[str, str, int], list[Stage]]:
    """Return a function that measures three process sets per side. Later versions are slower."""

    def sets(name: str) -> list[float]:
        level = size if int(name.removeprefix("x==")) >= culprit else 0.0
        return list(generator.normal(math.log1p(level), noise, 3))

    return lambda base, candidate, sets_before: [(sets(base), sets(candidate))]


def search(candidates: Candidates, comparisons: Comparisons) -> list[str]:
    """Return the versions among which the first bad one is."""
    good, bad = map(candidates.label, candidates.ends)
    assert comparisons.is_above((good, bad))
    found = first_bad(candidates, comparisons, lambda line: None)
    git(candidates.tree, "bisect", "reset")
    return list(map(candidates.label, found))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "noise"), [(0.05, 0.0026), (0.30, 0.03)], ids=["GPU", "CPU"])
def test_simulated_searches_find_the_culprit(steps: Candidates, size: float, noise: float) -> None:
    """20 searches of 16 commits. The sixth comparison is that of the culprit with the one before."""
    generator, right, most = np.random.default_rng(52), 0, 0
    for _ in range(20):
        culprit = int(generator.integers(1, COUNT + 1))
        comparisons = Comparisons(simulated(generator, culprit, size, noise))
        right += search(steps, comparisons) == [f"x=={culprit}"]
        comparisons.is_above((f"x=={culprit - 1}", f"x=={culprit}"))
        most = max(most, len(comparisons.stages))
    assert right >= 19
    assert most <= 6


def test_what_cannot_be_measured_is_skipped(steps: Candidates) -> None:
    """If the first bad one is among them, all that may be it are named."""
    generator = np.random.default_rng(1)
    measure = simulated(generator, 9, 0.3, 0.01)

    def broken(base: str, candidate: str, sets: int) -> list[Stage]:
        if candidate in ("x==8", "x==9"):
            raise CannotMeasure("it does not build")
        return measure(base, candidate, sets)

    assert sorted(search(steps, Comparisons(broken))) == ["x==10", "x==8", "x==9"]


def test_unclear_step_gets_more_sets_and_is_skipped() -> None:
    asked = []

    def half(base: str, candidate: str, sets: int) -> list[Stage]:
        """The candidate differs by half of what the ends differ by."""
        asked.append((candidate, sets))
        level = {"bad": 0.2, "half": 0.1}[candidate]
        return [((0.0, 0.01, -0.01), (level, level + 0.01, level - 0.01))]

    comparisons = Comparisons(half)
    assert comparisons.is_above(("good", "bad")) is True
    assert comparisons.is_above(("good", "half"), ("good", "bad")) is None
    assert asked == [("bad", 0), *(("half", sets) for sets in (0, 3, 6, 9))]


def test_noise_is_that_of_all_comparisons() -> None:
    stages: dict[tuple[str, str], list[Stage]] = {
        ("a", "b"): [((0.0, 0.02), (0.1, 0.12))],
        ("a", "c"): [((0.0, 0.04), (0.0, 0.04))],
    }
    change, error = Comparisons(lambda *_: [], stages).effect(("a", "b"))
    assert change == pytest.approx(0.1)
    variance = (2 * 0.02**2 / 2 + 2 * 0.04**2 / 2) / 4
    assert error == pytest.approx(3.747 * math.sqrt(variance), rel=1e-3), "with four degrees of freedom"


# --- environments


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    add_wheel(tmp_path / "index", "numpy", "2.0.0", {})
    return tmp_path / "index"


@pytest.mark.slow
def test_at_most_three_environments_exist(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environments"
    for minor in range(5):
        add_wheel(index, "torch", f"2.{minor}", {})
    for minor in (0, 4, 2, 3, 0):
        python = environment(folder, f"torch==2.{minor}", "torch==2.0")
        assert python.exists()
        assert len(list(folder.iterdir())) <= MOST_ENVIRONMENTS
    assert {path.name for path in folder.iterdir()} == {"2.0", "2.2", "2.3"}
    with pytest.raises(CannotMeasure, match=r"cannot be installed \(No matching distribution"):
        environment(folder, "torch==2.9", "torch==2.0")


def test_nightlies_of_each_day_lie_between() -> None:
    good, bad = "torch==2.15.0.dev20261129+cu130", "torch==2.16.0.dev20261202+cu130"
    found = days_between(good, bad)
    assert found == [f"torch==2.16.0.dev{day}+cu130" for day in (20261130, 20261201)]
    assert days_between("torch==2.14.0", bad) == []


# --- refusals


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the commits `one` and `two`, and `other`, which follows `one`."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    for tag in ("one", "two"):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", tag)
        git(tmp_path, "tag", tag)
    git(tmp_path, "checkout", "--quiet", "one")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "other")
    git(tmp_path, "tag", "other")
    return tmp_path


def said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["bisect", *arguments])
    status = bisect.main()
    printed = capfd.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize(
    ("good", "bad", "test", "sentence"),
    [
        ("one", "none", "a.py::t", "--bad none is no commit here, no interpreter and no NAME==VERSION"),
        ("two", "one", "a.py::t", "--good two is no earlier commit of --bad one; exchange them"),
        (
            "one",
            "one",
            "a.py::t",
            "--good one is no earlier commit of --bad one; name an earlier commit as --good",
        ),
        (
            "two",
            "other",
            "a.py::t",
            "--good two is no earlier commit of --bad other; name an earlier commit as --good",
        ),
        ("torch==2.1", "two", "a.py::t", "two is no NAME==VERSION, as torch==2.1 is one"),
        (sys.executable, "/etc/passwd", "a.py::t", "/etc/passwd is no interpreter, as"),
        ("one", "two", "t", "TEST takes a test such as perf/test_it.py::test_it[x], got t; name one"),
        ("one", "two", "", "{runs} holds no run; measure one with"),
        ("one", "two", "a.py::t", "one and two cannot be compared: unrecognized arguments: --base="),
    ],
)
def test_wrong_ends_are_one_sentence(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    good: str,
    bad: str,
    test: str,
    sentence: str,
) -> None:
    status, text = said(capfd, monkeypatch, "--good", good, "--bad", bad, test)
    assert status == 4
    assert text.startswith(sentence.format(runs=repository / ".ddpperf" / "runs"))
    assert text.count("\n") == 1
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list(repository.glob(".ddpperf/bisect/tree"))


def test_newest_run_names_the_test_and_its_options(repository: Path) -> None:
    run = read_document(REPOSITORY / "docs" / "runs" / "h100x4-gate_slower.json.gz")
    run["ddpperf"]["options"]["command_line"] = "perf/ -m gate --base ../main --model m:f --report=a.html"
    Storage(root=repository, hardware_key="h100x4").save_run(run, "1234")
    test, options = bisect.what_to_measure("", ["--rounds=3"], None)
    assert test.startswith("perf/test_")
    assert options == ["--model", "m:f", "--rounds=3"]
    assert bisect.what_to_measure("", [], ["a", "b", "", "a.py::t", ["-v"]]) == ("a.py::t", ["-v"])


def test_busy_machine_ends_the_search(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A step that was refused because of another run says nothing about its commit."""
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(tmp_path))
    monkeypatch.setattr(bisect, "visible_gpus", list)
    with lock_devices(["cpu"]):
        status, text = said(capfd, monkeypatch, "--good", "one", "--bad", "two", "a.py::t")
    assert status == 4
    assert text.startswith("cpu is being measured by process ")


def test_state_of_another_search_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = repository / ".ddpperf" / "bisect" / "search.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps(["v1", "v2", "", "a.py::t", []]))
    (state.parent / "1-0.json").touch()
    status, text = said(capfd, monkeypatch, "--good", "one", "--bad", "two", "a.py::t")
    assert status == 4
    assert text == (
        ".ddpperf/bisect has a search from v1 to v2 that has not ended; "
        "type its command again, or delete .ddpperf/bisect\n"
    )
    assert state.exists()
