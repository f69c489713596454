"""The page, the pictures, the exports, and the command that makes them from a stored run."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpperf.report.__main__ import main
from ddpperf.report.comparison import change
from ddpperf.report.csv_files import CSV_BEGINS, CURVES_BEGINS, metrics_csv
from ddpperf.report.html_page import page
from ddpperf.report.plots import pictures_of
from ddpperf.report.summary import sentences
from ddpperf.report.tables import tables_of
from ddpperf.results.stored_runs import read_document
from tests.canned import CannedSuite

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
GPU = ROOT / "docs" / "runs" / "h200x4-suite.json.gz"
LARGE_BATCH = ROOT / "docs" / "runs" / "h200x2-large_batch.json.gz"
GATE = ROOT / "docs" / "runs" / "cpu2-gate.json.gz"
LAWS = ROOT / "docs" / "runs" / "h200x4-own_ddp.json.gz"
RUNS = (CPU, GATE)


stored: Callable[[Path], dict[str, Any]] = read_document


def drawn(path: Path, name: str) -> Any:
    """Return the figure of the picture with this name."""
    (picture,) = [picture for picture in pictures_of(stored(path)) if picture.name == name]
    return picture.figure


def points_of(axes: Any) -> list[tuple[tuple[float, float], ...]]:
    """Return the points of each line, with six digits."""
    lines = [np.transpose([line.get_xdata(), line.get_ydata()]) for line in axes.get_lines()]
    return [tuple((round(float(x), 6), round(float(y), 6)) for x, y in line) for line in lines]


@cache
def page_of(path: Path) -> str:
    return page(stored(path))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_page_needs_no_other_file_and_no_script(path: Path) -> None:
    html = page_of(path)
    assert len(html.encode()) < 3_000_000
    assert not re.search(r"<(script|link|iframe|object)\b", html)
    assert all(source.startswith("data:") for source in re.findall(r'\b(?:src|href|srcset)="([^"]*)', html))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_page_has_verdict_tables_and_pictures(path: Path) -> None:
    document, html = stored(path), page_of(path)
    text = unescape(re.sub(r"<[^>]*>\s*", "|", html))
    assert all(reason in text for reason in sentences(document["ddpperf"]))
    for table in tables_of(document):
        assert table.title.capitalize() in text
        columns = [column.cells for column in (*table.properties, *table.figures)]
        assert all("||".join(row) in text for row in zip(*columns, strict=True))
    assert len(re.findall(r'<img [^>]*alt="[^"]+"', html)) == len(pictures_of(document))


def test_interval_without_an_upper_end_is_shown() -> None:
    document = stored(GATE)
    row = next(
        row for row in document["ddpperf"]["judged"]["rows"] if row["tests"] and row["metric"] == "time"
    )
    row["high"] = None
    assert f"{change(row['low'])} or more" in page(document)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            CPU,
            {"scaling", "epoch_scaling", "communication", "step_parts", "all_reduce"}
            | {"loss_by_epoch", "accuracy_by_epoch"},
        ),
        (GPU, {"scaling", "epoch_scaling", "all_reduce"}),
        (GATE, {"ab"}),
    ],
)
def test_pictures_are_those_of_the_measured_experiments(path: Path, names: set[str]) -> None:
    document = stored(path)
    assert names <= {picture.name for picture in pictures_of(document)}


def test_scaling_picture_shows_the_stored_speedups() -> None:
    """In panels with at most six lines, besides the ideal one. No look means two things."""
    panels = drawn(GPU, "scaling").axes
    points = {point for axes in panels for line in points_of(axes) for point in line}
    looks = [
        [
            (line.get_color(), line.get_linestyle())
            for line in axes.lines
            if line.get_marker() not in ("None", "_")
        ]
        for axes in panels
    ]
    assert max(map(len, looks)) <= 6
    assert len({look for of_panel in looks for look in of_panel}) == sum(map(len, looks)) > 6
    for test in stored(GPU)["benchmarks"]:
        found = test["extra_info"]["ddpperf"]
        if test["name"].startswith(("test_weak", "test_strong")) and "speedup" in found["metrics"]:
            speedup = round(found["metrics"]["speedup"]["value"], 6)
            assert (float(found["spec"]["world_size"]), speedup) in points


@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_law_picture_shows_points_and_band(law: str) -> None:
    (axes,) = drawn(LAWS, law).axes
    lines = set(points_of(axes))
    ideal = ((1.0, 1.0), (32.0, 32.0))
    assert ideal in lines
    ends = {points[-1] for points in lines - {ideal}}
    bands = [tuple(map(float, band.get_datalim(axes.transData).max)) for band in axes.collections]
    tests = [test for test in stored(LAWS)["benchmarks"] if test["name"].startswith(f"test_{law}")]
    assert len(bands) == len(tests) == (len(lines) - 1) / 2
    for test in tests:
        found = test["extra_info"]["ddpperf"]["metrics"]
        value = {name: metric["value"] for name, metric in found.items()}
        assert tuple((float(N), round(value[f"speedup_of_{N}"], 6)) for N in (2, 4)) in lines
        s, low = (max(0.0, value[f"serial_fraction{end}"]) for end in ("", "_low"))
        predicted, most = (32 - 31 * x if law == "gustafson" else 1 / (x + (1 - x) / 32) for x in (s, low))
        assert (32.0, round(predicted, 6)) in ends
        assert any(band == pytest.approx((32.0, most)) for band in bands)


@pytest.mark.parametrize("figure", ["loss", "accuracy"])
def test_curves_have_a_panel_for_each_training(figure: str) -> None:
    """The mean over seeds by epoch, for the training images and for the test images."""
    expected = []
    for test in stored(LARGE_BATCH)["benchmarks"]:
        found = test["extra_info"]["ddpperf"]
        seeds = [found, *(run for name, run in found["references"].items() if name.startswith("seed="))]
        if "epochs" in found["spec"]:
            counters = [seed["samples"][0]["counters"] for seed in seeds]
            expected += [
                [np.mean([c[f"{images}_{figure}_{epoch}"][0] for c in counters]) for epoch in range(1, 6)]
                for images in ("train", "test")
            ]
    panels = [axes for axes in drawn(LARGE_BATCH, f"{figure}_by_epoch").axes if axes.get_visible()]
    lines = [line for axes in panels for line in axes.get_lines() if line.get_color() != "lightgray"]
    curves = [found for line in lines if len(found := np.asarray(line.get_ydata()))]
    assert len(expected) == 2 * len(panels)
    assert np.sort(np.array(curves), axis=0) == pytest.approx(np.sort(np.array(expected), axis=0))
    assert all(axes.get_title().startswith("batch ") for axes in panels)


def test_names_with_markup_are_escaped() -> None:
    document = stored(GATE)
    document["ddpperf"]["verdict"]["reasons"] = ["<script>alert(1)</script> failed"]
    html = page(document)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; failed" in html


# --- python -m ddpperf.report


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command in this process."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["ddpperf.report", *map(str, arguments)])
        return subprocess.CompletedProcess([*map(str, arguments)], main(), *capfd.readouterr())

    return run


def test_command_writes_page_and_pictures(command: Command, tmp_path: Path) -> None:
    finished = command(CPU, "-o", tmp_path / "report.html", "--plots", tmp_path / "plots")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for ending in ("png", "svg"):
        assert (tmp_path / "plots" / f"scaling.{ending}").stat().st_size > 1000


def test_command_writes_markdown_page_of_results(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    assert command(GATE, "-o", page).returncode == command(CPU, "-o", page).returncode == 0
    text = page.read_text()
    assert text.startswith("# Results on cpu2-epyc-25-17-1\n")
    assert "    python -m pytest perf/\n" in text
    assert "\nSCALING  " in text


def test_command_finds_a_slower_run(command: Command, tmp_path: Path) -> None:
    slow = stored(CPU)
    stored_tests = {test["name"]: test["extra_info"]["ddpperf"] for test in slow["benchmarks"]}
    spec = stored_tests["test_weak_scaling[1rank-b32]"]["spec"]
    for test in stored_tests.values():
        if test["spec"] == spec:
            for sample in test["samples"]:
                sample["seconds"] = [[100 * value for value in ranks] for ranks in sample["seconds"]]
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    finished = command(tmp_path / "slow.json", "--baseline", CPU)
    printed = " ".join(finished.stdout.split())
    assert "NO VERDICT: two stored runs were compared, and nothing was measured" in printed
    assert "its time is 100.000 times the stored one" in printed


def test_what_is_no_file_is_refused(command: Command, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for arguments in ((tmp_path,), (CPU, "-o", tmp_path), (CPU, "--baseline", tmp_path), (CPU, "-o", fifo)):
        refused = command(*arguments)
        assert refused.returncode == 4
        assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_damaged_run_is_refused_in_one_sentence(command: Command, tmp_path: Path) -> None:
    run, document = tmp_path / "run.json", stored(CPU)
    document["benchmarks"][0]["extra_info"]["ddpperf"]["metrics"] = 7
    run.write_text(json.dumps(document))
    ended = command(run)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert re.fullmatch(rf"{re.escape(str(run))} cannot be shown \(.+\); name another run\n", ended.stderr)


@pytest.mark.parametrize("path", [CPU, GATE], ids=["plain", "A/B"])
def test_csv_has_every_metric(path: Path) -> None:
    document = stored(path)
    text = metrics_csv(document)
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


def test_curves_are_those_of_every_seed_and_epoch(command: Command, tmp_path: Path) -> None:
    ended = command(CPU, "--curves", tmp_path / "curves.csv")
    assert (ended.returncode, ended.stderr) == (0, "")
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


def test_run_without_trainings_has_no_curves(command: Command, tmp_path: Path) -> None:
    ended = command(GATE, "--curves", tmp_path / "curves.csv")
    assert (ended.returncode, ended.stderr.count("\n")) == (4, 1)
    assert ended.stderr.startswith("--curves writes whole trainings, and the run holds none; measure some")
    assert not (tmp_path / "curves.csv").exists()


@pytest.mark.parametrize("option", ["--csv", "--curves", "-o"])
def test_other_files_are_not_replaced(command: Command, tmp_path: Path, option: str) -> None:
    (tmp_path / "mine.json").write_text(CPU.read_text())
    ended = command(tmp_path / "mine.json", option, tmp_path / "mine.json")
    assert ended.returncode == 4
    assert ended.stderr.startswith(f"{option} replaces earlier ")
    assert ended.stderr.count("\n") == 1
    assert (tmp_path / "mine.json").read_text() == CPU.read_text()


# --- options of a run


def test_run_writes_page_and_tables(canned_suite: CannedSuite) -> None:
    run = canned_suite.run("perf", "--report", "page.html", "--tables")
    run.assert_one_sentence(0, "saved the page: page.html")
    assert (canned_suite.root / "page.html").read_text().startswith("<!doctype html>")
    assert "\n- Q2: weak scaling: `python" in run.output


def test_page_that_cannot_be_made_loses_nothing(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[Any]:
        raise ImportError("libfreetype.so.6: cannot open shared object file")

    monkeypatch.setattr("ddpperf.report.html_page.pictures_of", broken)
    run = canned_suite.run("perf", "--report", "page.html")
    run.assert_one_sentence(4, "the page was not saved: libfreetype.so.6: cannot open")
    run.assert_one_sentence(4, "PASS: 1 test measured")
    assert len(canned_suite.saved_runs()) == 1
