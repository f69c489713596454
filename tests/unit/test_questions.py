"""The tables of a report where no frozen run has their figures (test_frozen_numbers.py)."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.report.questions import report_tables
from ddpperf.report.questions.figures import text_of
from ddpperf.report.questions.grid import WIDTH
from ddpperf.report.questions.question import read_questions
from ddpperf.report.stored_cases import cases_of, of_functions
from ddpperf.results.stored_runs import read_document

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
CPU_REPORT = ROOT / "docs" / "runs" / "cpu2-report.json.gz"
TWO = ROOT / "docs" / "runs" / "h200x2-questions.json.gz"
SUITE = ROOT / "docs" / "runs" / "h200x4-suite.json.gz"
REPORTS = ROOT / "docs" / "runs" / "h200x1-reports.json.gz"
REMEDIES = ROOT / "docs" / "runs" / "h200x1-remedies.json.gz"
LAWS = ROOT / "docs" / "runs" / "h200x4-own_ddp.json.gz"
Json = dict[str, Any]


@cache
def run(path: Path) -> Json:
    document: Json = read_document(path)
    return document


def section(document: Json, title: str) -> str:
    return report_tables(document).split(f"## {title}\n")[1].split("\n## ")[0]


def rows_in(document: Json, title: str) -> list[dict[str, str]]:
    """Return the rows of all grids of a question; a grid that continues below has its rows twice."""
    found: list[dict[str, str]] = []
    headings: list[str] = []
    for line in section(document, title).splitlines():
        cells = line.strip("| ").split(" | ")
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif not line.startswith("|---"):
            found.append(dict(zip(headings, cells, strict=True)))
    return found


def test_impossible_fraction_is_explained() -> None:
    """Amdahl's law divides by zero on 16 devices with this fraction."""
    document = copy.deepcopy(run(LAWS))
    for test in document["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if "serial_fraction" in metrics:
            metrics["serial_fraction"]["value"] = -1 / 15
    meaning = "a serial fraction of -6.7% means that speedups exceed the number of devices: "
    assert meaning in " ".join(section(document, "Laws of scaling").split())
    found = rows_in(document, "Laws of scaling")
    assert not any("predicted speedup" in row for row in found)


# --- costs


def test_price_is_that_of_the_device_time() -> None:
    """Two devices for 45 minutes, and 60 minutes on one: 30 extra device-minutes for 15 saved ones."""
    document = copy.deepcopy(run(CPU_REPORT))
    document["ddpperf"]["options"]["gpu_hour_price"] = 2.0
    (test,) = [test for test in document["benchmarks"] if test["name"].startswith("test_epoch_scaling[2rank")]
    for name, seconds in (("device", 5400.0), ("saved", 900.0), ("extra_device", 1800.0)):
        metric = {"value": seconds, "unit": "s", "by_set": {"A1": seconds}}
        test["extra_info"]["ddpperf"]["metrics"][f"{name}_seconds_per_epoch"] = metric
    found = [row for row in rows_in(document, "Cost of an epoch") if row["ranks"] == "2"]
    figures = {name: cell.partition(" !")[0] for row in found for name, cell in row.items()}
    assert figures["device-minutes"] == "90.0000"
    assert (figures["% saved"], figures["extra price"]) == ("25.0%", "1.00")
    assert (figures["price"], figures["price of a saved hour"]) == ("3.00", "4.00")


def test_tests_that_failed_before_their_metrics_answer_nothing() -> None:
    """Their time is stored, and the tables of the other tests are still printed."""
    document = copy.deepcopy(run(CPU))
    for test in document["benchmarks"]:
        if not test["name"].startswith("test_weak_scaling"):
            test["extra_info"]["ddpperf"]["metrics"] = {}
    text = report_tables(document)
    assert "36.9%" in text
    assert text.count("\n- ") == len(read_questions()) - 2, "weak scaling answers two"


# --- grids


def test_grid_has_devices_as_rows_and_batches_as_columns() -> None:
    """The step on one device is in the grid of each strategy, and eager steps in grids of their own."""
    text = section(run(SUITE), "Q2: weak scaling")
    captions = " ".join(text.split())
    assert captions.count("torch 2.11.0+cu130. |") == 5, "graph, eager DDP, DataParallel, compiled, ViT"
    assert "weak scaling, resnet18_cifar, bf16, graph, ddp+avg" in captions
    assert "50,000 synthetic images an epoch, 4 NVIDIA H200" in captions
    assert (
        "| GPUs | batch 32: step | epoch | speedup | 128: step | epoch | speedup | "
        "512: step | epoch | speedup |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
        "| 1 | 1.782 ms | 2.784 s | - | 3.045 ms | 1.187 s | - | 8.589 ms | 833.1 ms | - |\n"
        "| 2 | 2.035 ms | 1.589 s | 1.75x | 3.306 ms | 644.6 ms | 1.84x | 8.945 ms | 429.3 ms | 1.92x |\n"
        "| 4 | 2.067 ms | 806.1 ms | 3.45x | 3.338 ms | 323.8 ms | 3.65x | 8.972 ms | 215.3 ms | 3.84x |\n"
    ) in text
    assert text.count("| 1 | 4.972 ms ") == 2, "of DDP and of DataParallel"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "runs").glob("*.json.gz")), ids=lambda path: path.name
)
def test_no_line_is_wider_than_a_page(path: Path) -> None:
    lines = report_tables(run(path)).splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []


def test_warnings_are_marked_and_explained_below_their_grid() -> None:
    _, eager, *_ = section(run(SUITE), "Q2: weak scaling").split("weak scaling, ")[1:]
    (mark,) = set(re.findall(r"![0-9]+", eager))
    assert eager.count(f" ms {mark} |") == 6, "steps of 32 and of 128 images wait for the CPU"
    assert f"- {mark} the CPU's launches bound it, not the GPU" in eager


def test_accuracies_of_synthetic_images_are_not_shown() -> None:
    assert "Synthetic images: accuracies mean nothing" in report_tables(run(CPU))
    assert "%" not in section(run(CPU), "Q4: accuracy with a large batch")
    assert "Synthetic" not in report_tables(run(REPORTS))


def test_what_reports_state_is_beside_the_same_training_here() -> None:
    """Reports A and B state training accuracies of the same training with a small batch."""
    small, *_ = rows_in(run(REMEDIES), "Q4: the reports' accuracies")
    assert small == {
        "training": "128, as it is",
        "figure": "train accuracy",
        "ddpperf": "72.5%",
        "report A": "84.90%",
        "report B": "82.22%",
    }


STORED = sorted((*ROOT.glob("docs/runs/*.json.gz"), *ROOT.glob("perf/baselines/*/*_core.json")))


def test_a_stored_run_has_each_column_of_each_question() -> None:
    """No stored run has a price, or steps with messages of these kinds."""
    printed = " ".join(report_tables(run(path)) for path in STORED)
    for question in read_questions():
        assert f"## {question.title}\n" in printed
        headings = {name for name in question.columns if re.search(rf"[|:] {re.escape(name)} \|", printed)}
        missing = question.columns.keys() - headings
        assert missing <= {"price", "extra price", "price of a saved hour", "model", "control"}, (
            question.title
        )


def test_factors_and_fractions_are_those_of_a_step_in_a_table_of_epochs() -> None:
    (case, *_) = of_functions(cases_of(run(TWO)), "test_comm_split")
    for name in ("link_utilization", "overlap_fraction"):
        assert text_of(case, name, per_epoch=True) == text_of(case, name) != ""
    assert text_of(case, "compute_seconds", per_epoch=True) != text_of(case, "compute_seconds")


def test_metric_of_another_unit_is_refused_in_one_sentence() -> None:
    document = copy.deepcopy(run(TWO))
    test = next(test for test in document["benchmarks"] if test["name"].startswith("test_comm_split"))
    test["extra_info"]["ddpperf"]["metrics"]["exposed_comm_seconds"]["unit"] = "ms"
    with pytest.raises(Refused, match=r"exposed_comm_seconds of .* is stored in ms, not in s; measure it"):
        report_tables(document)


def test_tests_that_failed_or_did_not_run_are_counted_first() -> None:
    assert report_tables(run(TWO)).startswith("Of this run, 55 tests did not run, so figures are missing.")
    document = copy.deepcopy(run(SUITE))
    scaling = next(name for name in document["ddpperf"]["outcomes"] if "test_weak_scaling" in name)
    document["ddpperf"]["outcomes"][scaling] |= {"kind": "failed", "reason": "too slow"}
    text = report_tables(document)
    assert text.startswith("Of this run, 1 test failed, so figures are missing.")
    assert "the test failed: too slow" in text
