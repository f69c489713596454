"""The page, the pictures and the command that make them from a stored run."""

from __future__ import annotations

import copy
import gzip
import json
import os
import subprocess
import sys
import time
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpperf.analysis.bandwidth import crossing_factor
from ddpperf.report.__main__ import main
from ddpperf.report.page import page
from ddpperf.report.plots import pictures_of
from ddpperf.report.tables import tables_of
from tests.canned import CannedSuite

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
GPU = ROOT / "docs" / "runs" / "h200x4-suite.json.gz"
LARGE_BATCH = ROOT / "docs" / "runs" / "h200x2-large_batch.json.gz"
GATE = ROOT / "docs" / "runs" / "cpu2-gate.json.gz"
LAWS = ROOT / "docs" / "runs" / "h200x4-own_ddp.json.gz"
NODES = ROOT / "docs" / "runs" / "2xcpu2-nodes.json.gz"  # 2 nodes of 2 ranks
RUNS = (CPU, GPU, GATE)


@cache
def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def stored(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text_of(path))
    return document


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if "td" in self.open:
            self.rows[-1][-1] += data


@pytest.mark.figures
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_page_is_made_in_five_seconds(path: Path) -> None:
    page(stored(CPU))  # imports matplotlib
    began = time.perf_counter()
    page(stored(path))
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_page_needs_no_other_file_and_no_script(path: Path) -> None:
    html = page(stored(path))
    assert len(html.encode()) < 3_000_000
    parsed = Parsed(html)
    assert parsed.open == []
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parsed.elements}
    for _, attributes in parsed.elements:
        for name in ("src", "href", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_page_has_verdict_tables_and_pictures(path: Path) -> None:
    document = stored(path)
    parsed = Parsed(page(document))
    for reason in document["ddpperf"]["verdict"]["reasons"]:
        assert reason in parsed.text
    rows = [[cell.strip() for cell in row] for row in parsed.rows]
    for table in tables_of(document):
        assert table.title.capitalize() in parsed.text
        columns = [column.cells for column in (*table.facets, *table.figures)]
        for cells in zip(*columns, strict=True):
            assert list(cells) in [row[: len(cells)] for row in rows]
    images = [attributes for tag, attributes in parsed.elements if tag == "img"]
    assert len(images) == len(pictures_of(document))
    assert all(image["alt"] for image in images)


def test_page_has_the_formulas_of_reports() -> None:
    document = stored(GPU)
    assert "Formulas of reports" not in Parsed(page(document)).text, "the rate of its link is not stored"
    for test in document["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if busbw := metrics.get("busbw_bytes_per_second"):
            metrics["link_utilization"] = busbw | {"unit": "1", "value": busbw["value"] / 450e9}
    parsed = Parsed(page(document))
    (row,) = [row for row in parsed.rows if row[:3] == ["4", "1 GiB", "2 (N-1) S / N"]]
    assert row[3:] == ["bytes that one rank of a ring sends", "3.579 ms", "4.549 ms", "0.787"]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            CPU,
            {"scaling", "epoch_scaling", "communication", "step_parts", "all_reduce", "messages"}
            | {"loss_by_epoch", "accuracy_by_epoch"},
        ),
        (GPU, {"scaling", "batch_size", "epoch_scaling", "all_reduce"}),
        (GATE, {"ab"}),
    ],
)
def test_pictures_are_those_of_the_measured_experiments(path: Path, names: set[str]) -> None:
    document = stored(path)
    assert names <= {picture.name for picture in pictures_of(document)}


def test_scaling_picture_shows_the_stored_speedups() -> None:
    document = stored(GPU)
    pictures = pictures_of(document)
    (scaling,) = [picture for picture in pictures if picture.name == "scaling"]
    (axes,) = scaling.figure.axes
    drawn = {
        (float(x), round(float(y), 9))
        for line in axes.get_lines()
        for x, y in np.transpose([line.get_xdata(), line.get_ydata()])
    }
    for test in document["benchmarks"]:
        found = test["extra_info"]["ddpperf"]
        if test["name"].startswith(("test_weak", "test_strong")) and "speedup" in found["metrics"]:
            speedup = round(found["metrics"]["speedup"]["value"], 9)
            assert (float(found["spec"]["world_size"]), speedup) in drawn


def test_all_reduce_picture_has_the_known_links_only() -> None:
    """One link is between the nodes, the other one inside them."""
    document = stored(NODES)
    for test in document["benchmarks"]:
        found = test["extra_info"]["ddpperf"]
        if found["spec"].get("algorithm") == "hierarchical" and "link_utilization" in found["metrics"]:
            used = found["metrics"]["busbw_bytes_per_second"]["value"] / 1.25e9
            factor = crossing_factor("hierarchical", found["spec"]["world_size"], 2)
            found["metrics"]["link_utilization"]["value"] = factor * used
    (picture,) = [picture for picture in pictures_of(document) if picture.name == "all_reduce"]
    (axes,) = picture.figure.axes
    lines = [line for line in axes.get_lines() if line.get_label() == "link"]
    links = {link["bytes_per_second"] / 1e9 for link in document["ddpperf"]["environment"]["links"]}
    assert sorted(float(np.max(line.get_ydata())) for line in lines) == pytest.approx(sorted(links), rel=1e-3)


@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_law_picture_shows_points_and_band(law: str) -> None:
    document = stored(LAWS)
    (picture,) = [picture for picture in pictures_of(document) if picture.name == law]
    (axes,) = picture.figure.axes
    lines = {
        tuple(
            (round(float(x), 6), round(float(y), 6))
            for x, y in np.transpose([line.get_xdata(), line.get_ydata()])
        )
        for line in axes.get_lines()
    }
    ideal = ((1.0, 1.0), (32.0, 32.0))
    assert ideal in lines
    ends = {points[-1] for points in lines - {ideal}}
    bands = [tuple(map(float, band.get_datalim(axes.transData).max)) for band in axes.collections]
    tests = [test for test in document["benchmarks"] if test["name"].startswith(f"test_{law}")]
    assert len(bands) == len(tests) == (len(lines) - 1) / 2
    for test in tests:
        found = test["extra_info"]["ddpperf"]["metrics"]
        value = {name: metric["value"] for name, metric in found.items()}
        points = tuple((float(N), round(value[f"speedup_of_{N}"], 6)) for N in (2, 4))
        assert points in lines
        predicted = [
            law_of(max(0.0, value[f"serial_fraction{end}"]), 32)
            if law == "gustafson"
            else 1 / (value[f"serial_fraction{end}"] * 31 / 32 + 1 / 32)
            for end in ("", "_low")
        ]
        assert (32.0, round(predicted[0], 6)) in ends
        assert any(band == pytest.approx((32.0, predicted[1])) for band in bands)


def law_of(s: float, N: int) -> float:
    return N - s * (N - 1)


@pytest.mark.parametrize("figure", ["loss", "accuracy"])
def test_curves_have_a_panel_for_each_training(figure: str) -> None:
    """The mean over seeds by epoch, for the training images and for the test images."""
    document = stored(LARGE_BATCH)
    (picture,) = [picture for picture in pictures_of(document) if picture.name == f"{figure}_by_epoch"]
    expected = []
    for test in document["benchmarks"]:
        found = test["extra_info"]["ddpperf"]
        seeds = [found, *(run for name, run in found["references"].items() if name.startswith("seed="))]
        if "epochs" in found["spec"]:
            counters = [seed["samples"][0]["counters"] for seed in seeds]
            expected += [
                [np.mean([c[f"{images}_{figure}_{epoch}"][0] for c in counters]) for epoch in range(1, 6)]
                for images in ("train", "test")
            ]
    panels = [axes for axes in picture.figure.axes if axes.get_visible()]
    lines = [line for axes in panels for line in axes.get_lines() if line.get_color() != "lightgray"]
    drawn = [found for line in lines if len(found := np.asarray(line.get_ydata()))]
    assert len(expected) == 2 * len(panels)
    assert np.sort(np.array(drawn), axis=0) == pytest.approx(np.sort(np.array(expected), axis=0))
    assert all(axes.get_title().startswith("batch ") for axes in panels)


def test_history_shows_every_kept_run() -> None:
    document = stored(GATE)
    history = [("0001_a", {"x.py::t": 1.0, "x.py::once": 2.0}), ("0002_b", {"x.py::t": 1.1})]
    pictures = pictures_of(document, history)
    (picture,) = [picture for picture in pictures if picture.name == "history"]
    image = picture.figure.axes[0].get_images()[0].get_array()
    assert image is not None
    assert image.tolist() == [pytest.approx([1 / 1.05, 1.1 / 1.05])]


def test_names_with_markup_are_escaped() -> None:
    document = copy.deepcopy(stored(CPU))
    evil = "<script>alert(1)</script>"
    test = document["benchmarks"][0]
    outcome = document["ddpperf"]["outcomes"].pop(test["fullname"])
    test["fullname"] += evil
    document["ddpperf"]["outcomes"][test["fullname"]] = outcome
    document["ddpperf"]["verdict"]["reasons"] = [f"{evil} failed"]
    html = page(document)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; failed" in html


# --- python -m ddpperf.report


def command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpperf.report", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_command_writes_page_and_pictures(tmp_path: Path) -> None:
    finished = command(CPU, "-o", tmp_path / "report.html", "--plots", tmp_path / "plots")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for ending in ("png", "svg"):
        assert (tmp_path / "plots" / f"scaling.{ending}").stat().st_size > 1000


def test_command_writes_markdown_page_of_results(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("mine")
    assert "-o replaces earlier pages only" in command(GATE, "-o", page).stderr
    page.unlink()
    assert command(GATE, "-o", page).returncode == command(CPU, "-o", page).returncode == 0
    text = page.read_text()
    assert text.startswith("# Results on cpu2-epyc-25-17-1\n")
    assert "    python -m pytest perf/\n" in text
    assert "\nSCALING  " in text


def test_command_compares_two_stored_runs() -> None:
    finished = command(CPU, "--baseline", CPU)
    assert finished.returncode == 0, finished.stderr
    assert "ratio 1.000" in finished.stdout
    assert "with 0014_core.json: 45 times, in the median 0.0% shorter than stored" in finished.stdout
    assert "NO VERDICT: " in finished.stdout  # the limits of one stored run are wide on a CPU


def test_command_finds_a_slower_run(tmp_path: Path) -> None:
    slow = stored(CPU)
    for test in slow["benchmarks"]:
        if test["name"].startswith("test_weak_scaling[1rank"):
            for sample in test["extra_info"]["ddpperf"]["samples"]:
                sample["seconds"] = [[100 * value for value in ranks] for ranks in sample["seconds"]]
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    finished = command(tmp_path / "slow.json", "--baseline", CPU)
    assert (
        "FAIL: perf/test_scaling.py::test_weak_scaling[1rank-b32] is slower: 100.00 times" in finished.stdout
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"benchmarks": []}', "was not saved by ddpperf"),
        ("[1, 2]", "was not saved by ddpperf"),
        ("{", "cannot be read"),
        ('{"ddpperf": {"schema": 1}, "benchmarks": []}', "has schema 1, this ddpperf reads 2"),
        (f'{{"ddpperf": {{"schema": "{"x" * 4000}"}}}}', "has schema 'xxx"),
        ('{"ddpperf": {"schema": 2}}', "is damaged (its hardware_key is None); name another run"),
        ('{"ddpperf": {"schema": 2, "hardware_key": "cpu2"}, "benchmarks": []}', "holds no measured test"),
        (
            '{"ddpperf": {"schema": 2, "hardware_key": "cpu2"}, "benchmarks": [{"fullname": "x"}]}',
            "is damaged",
        ),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    run = tmp_path / "run.json"
    run.write_text(content)
    finished = command(run, "-o", tmp_path / "report.html")
    assert finished.returncode == 4
    assert words in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert len(finished.stderr.replace(str(run), "run.json")) < 200
    assert not (tmp_path / "report.html").exists()


def test_page_replaces_earlier_pages_only(tmp_path: Path) -> None:
    mine, earlier = tmp_path / "mine.txt", tmp_path / "report.html"
    mine.write_text("precious")
    refused = command(CPU, "-o", mine)
    assert refused.returncode == 4
    assert refused.stderr.startswith("-o replaces earlier pages only, got ")
    assert mine.read_text() == "precious"
    for _ in range(2):
        assert command(GATE, "-o", earlier).returncode == 0


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    os.mkfifo(place) if what == "fifo" else place.mkdir()
    for arguments in ((place,), (CPU, "-o", place), (CPU, "--baseline", place)):
        refused = command(*arguments)
        assert refused.returncode == 4
        assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_damaged_values_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str | Path) -> tuple[int, str]:
        """Return the status and the standard error of ddpperf.report, which runs in this process."""
        monkeypatch.setattr(sys, "argv", ["ddpperf.report", *map(str, arguments)])
        return main(), capfd.readouterr().err

    run = tmp_path / "run.json"
    for path, value in (
        (("ddpperf", "timing", "counted_seconds"), 10**400),
        (("ddpperf", "outcomes"), None),
        (("ddpperf", "verdict"), {}),
        (("benchmarks", 0, "extra_info", "ddpperf", "samples", 0, "counters"), {"x": [10**400]}),
        (("benchmarks", 0, "extra_info", "ddpperf", "metrics"), 7),
    ):
        document = stored(CPU)
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        run.write_text(json.dumps(document))
        status, error = command(run)
        assert (status, len(error.splitlines())) == (4, 1), error[-300:]
        assert len(error) < 500
        for arguments in (("--baseline", CPU), ("-o", tmp_path / "page.html")):
            status, error = command(run, *arguments)  # which may need no damaged value
            assert status in (0, 4)
            assert len(error.splitlines()) == (status == 4), error[-300:]


def test_unreadable_names_are_written_anywhere(tmp_path: Path) -> None:
    document = stored(GATE)
    document["ddpperf"]["verdict"]["reasons"] = ["caf\u00e9 \ud800 \x1b]0;title\x07"]
    run = tmp_path / "run.json"
    run.write_text(json.dumps(document))
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for arguments in ((), ("-o", str(tmp_path / "page.html"))):
        finished = subprocess.run(
            [sys.executable, "-m", "ddpperf.report", str(run), *arguments],
            cwd=ROOT,
            env=ascii_only,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (finished.returncode, finished.stderr) == (0, b"")
        assert b"\x1b" not in finished.stdout


def test_reader_may_stop_early() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpperf.report", str(CPU)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_missing_run_or_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for arguments in (("nowhere.json",), (CPU, "-o", tmp_path / "no" / "report.html")):
        finished = command(*arguments)
        assert finished.returncode == 4
        assert len(finished.stderr.splitlines()) == 1, finished.stderr
    assert list(tmp_path.iterdir()) == []


# --- options of a run


def test_run_writes_page_and_tables(canned_suite: CannedSuite) -> None:
    run = canned_suite.run("perf", "--report", "page.html", "--tables")
    run.assert_one_sentence(0, "saved the page: page.html")
    assert (canned_suite.root / "page.html").read_text().startswith("<!doctype html>")
    assert "\n- Q2: time and speedup by batch size and devices: `python" in run.output
    canned_suite.run("perf", "--report", "page.html")
    html = (canned_suite.root / "page.html").read_text()
    assert "Time of each test in each kept run" in html


def test_page_that_cannot_be_made_loses_nothing(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[Any]:
        raise ImportError("libfreetype.so.6: cannot open shared object file")

    monkeypatch.setattr("ddpperf.report.page.pictures_of", broken)
    run = canned_suite.run("perf", "--report", "page.html")
    run.assert_one_sentence(4, "the page could not be made (libfreetype.so.6: cannot open", "can try again")
    run.assert_one_sentence(4, "PASS: 1 test measured")
    assert len(canned_suite.saved_runs()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--report", "nowhere/page.html"), "--report takes a file in a writable folder, got"),
        (("--report", ""), "--report takes a file in a writable folder, got ''"),
        (("--report", "perf/test_it.py"), "--report replaces earlier pages only, got "),
        (("--report", "a.md", "--verdict", "a.md"), "--report and --verdict name the same file 'a.md'"),
    ],
)
def test_place_that_cannot_be_written_is_refused(
    canned_suite: CannedSuite, arguments: tuple[str, ...], words: str
) -> None:
    canned_suite.run("perf", *arguments).assert_one_sentence(4, words)
    assert not (canned_suite.root / ".ddpperf").exists()
