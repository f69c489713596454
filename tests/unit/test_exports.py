"""Exports of a stored run, read by the programs that they are for or by their rules."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ddpperf.report.__main__ import main as report
from ddpperf.report.exports import CSV_BEGINS, CURVES_BEGINS, write_csv
from ddpperf.results.stored_runs import read_document
from tests.canned import CannedSuite
from tests.project import REPOSITORY

CPU = REPOSITORY / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
GATE = REPOSITORY / "docs" / "runs" / "cpu2-gate.json.gz"
# What a test of plain pytest-benchmark looks like
PLAIN = "def test_plain(benchmark):\n    benchmark.pedantic(sum, args=([1, 2],), rounds=3)\n"

Run = Callable[..., subprocess.CompletedProcess[str]]
stored: Callable[[Path], dict[str, Any]] = read_document


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs the main function of a command in this process and in tmp_path."""

    def run(main: Callable[[], int], *arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        capsys.readouterr()
        status = main()
        return subprocess.CompletedProcess([*map(str, arguments)], status, *capsys.readouterr())

    return run


# --- pytest-benchmark's JSON


@pytest.fixture
def ours(canned_suite: CannedSuite) -> dict[str, Any]:
    """Return the JSON that a run of ddpperf writes."""
    finished = canned_suite.run("perf", "--benchmark-json=ours.json")
    assert finished.status == 0, finished
    return stored(canned_suite.root / "ours.json")


def kinds(value: object) -> object:
    """Return the keys of a JSON object with the types of their values; a number is a number."""
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return list
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def test_json_has_the_fields_of_pytest_benchmark(ours: dict[str, Any], tmp_path: Path) -> None:
    """So github-action-benchmark finds fullname, ops, stddev, mean and rounds, with its tool "pytest"."""
    (tmp_path / "test_plain.py").write_text(PLAIN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-json=plain.json"]
    # pytest-xdist's variables would disable the benchmark
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    plain = stored(tmp_path / "plain.json")
    assert plain.keys() <= ours.keys()
    expected, found = plain["benchmarks"][0], ours["benchmarks"][0]
    assert expected.keys() == found.keys()
    assert kinds(expected["stats"]) == kinds(found["stats"])
    assert ours["machine_info"].keys() >= {"node", "machine", "system", "python_version", "cpu"}
    assert plain["commit_info"].keys() - {"error"} <= ours["commit_info"].keys()


def test_bencher_reads_each_test(ours: dict[str, Any]) -> None:
    """Its adapter "python_pytest" needs these four statistics in seconds, and the names of tests."""
    for found in ours["benchmarks"]:
        stats = found["stats"]
        assert found["fullname"]
        assert all(math.isfinite(stats[name]) for name in ("mean", "stddev", "median", "iqr"))
        seconds = found["extra_info"]["ddpperf"]["samples"][0]["seconds"]
        steps = found["extra_info"]["ddpperf"]["iterations"]
        assert stats["median"] == pytest.approx(median(max(ranks) for ranks in seconds) / steps)


# --- CSV


@pytest.mark.parametrize("path", [CPU, GATE], ids=["plain", "A/B"])
def test_csv_has_every_metric(path: Path, tmp_path: Path) -> None:
    document = stored(path)
    text = write_csv(tmp_path / "metrics.csv", document).read_text()
    assert text.encode().startswith(CSV_BEGINS)
    rows = list(csv.DictReader(text.splitlines()))
    by_name = {(row["test"], row["metric"]): row for row in rows}
    assert len(by_name) == len(rows)
    for found in document["benchmarks"]:
        metrics = found["extra_info"]["ddpperf"]["metrics"]
        assert {name for test, name in by_name if test == found["fullname"]} >= metrics.keys()
        if path == CPU:
            for name, metric in metrics.items():
                assert float(by_name[found["fullname"], name]["value"]) == metric["value"]
    assert {row["hardware"] for row in rows} == {document["ddpperf"]["hardware_key"]}
    assert all(float(row["least"]) <= float(row["value"]) <= float(row["most"]) for row in rows)


# --- the command


def test_two_options_may_not_name_one_file(run: Run, tmp_path: Path) -> None:
    ended = run(report, CPU, "--csv", "a", "--curves", "./a")
    assert (ended.returncode, ended.stderr) == (
        4,
        "--curves names a, as another option does; name two files\n",
    )
    assert not (tmp_path / "a").exists()


def test_curves_are_those_of_every_seed_and_epoch(run: Run, tmp_path: Path) -> None:
    ended = run(report, CPU, "--curves", "curves.csv")
    assert (ended.returncode, ended.stdout) == (0, "saved curves.csv\n"), ended.stderr
    text = (tmp_path / "curves.csv").read_text()
    assert text.startswith(CURVES_BEGINS.decode())
    rows = list(csv.DictReader(text.splitlines()))
    (test,) = [test for test in stored(CPU)["benchmarks"] if test["name"].startswith("test_large_batch")]
    found = test["extra_info"]["ddpperf"]
    seeds = [found, *found["references"].values()]
    assert len(rows) == len(seeds) * found["spec"]["epochs"]
    for row in rows:
        (seed,) = [seed for seed in seeds if seed["spec"]["seed"] == int(row["seed"])]
        counters = seed["samples"][0]["counters"]
        assert row["test"] == test["fullname"]
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            assert float(row[name]) == counters[f"{name}_{row['epoch']}"][0]


def test_run_without_trainings_has_no_curves(run: Run, tmp_path: Path) -> None:
    ended = run(report, GATE, "--curves", "curves.csv")
    assert (ended.returncode, ended.stderr.count("\n")) == (4, 1)
    assert ended.stderr.startswith("--curves writes whole trainings, and the run holds none; measure some")
    assert not (tmp_path / "curves.csv").exists()


@pytest.mark.parametrize("option", ["--csv", "--curves", "-o"])
def test_other_files_are_not_replaced(run: Run, tmp_path: Path, option: str) -> None:
    (tmp_path / "mine.json").write_text(CPU.read_text())
    ended = run(report, tmp_path / "mine.json", option, "mine.json")
    assert ended.returncode == 4
    assert ended.stderr.startswith(f"{option} replaces earlier ")
    assert ended.stderr.count("\n") == 1
    assert (tmp_path / "mine.json").read_text() == CPU.read_text()
