"""The tables of a report where no frozen run has their figures (test_frozen_numbers.py)."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ddpperf.report.questions import report_tables
from ddpperf.report.questions.grid import WIDTH
from ddpperf.report.questions.question import read_questions
from ddpperf.results.stored_runs import read_document

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
CPU_REPORT = ROOT / "docs" / "runs" / "cpu2-report.json.gz"
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
    figures = {name: cell for row in found for name, cell in row.items()}
    assert figures["device-minutes"].startswith("90.0000")
    assert (figures["% saved"], figures["extra price"]) == ("25.0%", "1.00")
    assert (figures["price"], figures["a saved hour"]) == ("3.00", "4.00")


def test_tests_that_failed_before_their_metrics_answer_nothing() -> None:
    """Their time is stored, and the tables of the other tests are still printed."""
    document = copy.deepcopy(run(CPU))
    for test in document["benchmarks"]:
        if not test["name"].startswith("test_weak_scaling"):
            test["extra_info"]["ddpperf"]["metrics"] = {}
    text = report_tables(document)
    assert "36.9%" in text
    assert text.count("\n- ") == len(read_questions()) - 2, "weak scaling answers two"


def with_part_speedups() -> Json:
    """Return a stored run with the speedups of the parts on 2 and on 4 ranks, which were not measured.

    They are those of weak scaling: on one device forward takes 10 ms, and backward 30 ms.
    """
    document = copy.deepcopy(run(CPU))
    (test,) = (found for found in document["benchmarks"] if found["name"] == "test_step_breakdown[2rank-b32]")
    header = document["ddpperf"]
    for N in (2, 4):
        made = copy.deepcopy(test)
        made["fullname"] = f"perf/test_step_breakdown.py::test_weak_parts_speedup[{N}rank-b32]"
        stored = made["extra_info"]["ddpperf"]
        stored["spec"]["world_size"] = N
        for sample in stored["samples"]:
            sample["seconds"] = [[ranks[0]] * N for ranks in sample["seconds"]]
        values = {
            "forward_seconds_on_one_device": 0.01,
            "backward_seconds_on_one_device": 0.03,
            "forward_seconds": 0.01,
            "backward_seconds": 0.04,
            "gradient_sync_seconds": 0.01 * N,
            "forward_speedup": N,
            "backward_speedup": 0.75 * N,
        }
        stored["metrics"] = {
            name: {"value": value, "unit": "", "by_set": {}} for name, value in values.items()
        }
        document["benchmarks"].append(made)
        header["outcomes"][made["fullname"]] = header["outcomes"][test["fullname"]]
    return document


def test_speedups_of_parts_have_a_row_for_each_part() -> None:
    text = section(with_part_speedups(), "Speedup of the parts of a step")
    head, _, *found = [line for line in text.splitlines() if line.startswith("|")]
    columns = (f"fixed, {N} ranks: alone | together | speedup" for N in (2, 4))
    assert head == f"| part | {' | '.join(columns)} |"
    assert found == [
        "| forward | 10.00 ms | 10.00 ms | 2.00x | 10.00 ms | 10.00 ms | 4.00x |",
        "| backward | 30.00 ms | 40.00 ms | 1.50x | 30.00 ms | 40.00 ms | 3.00x |",
        "| gradient sync | - | 20.00 ms | - | - | 40.00 ms | - |",
        "| all parts | 40.00 ms | 70.00 ms | 1.14x | 40.00 ms | 90.00 ms | 1.78x |",
    ]


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


def test_parts_add_up_to_the_step() -> None:
    for title, whole in (("Parts of a step", "step"), ("Parts of an epoch", "epoch")):
        for row in rows_in(run(CPU), title):
            parts = {name: in_seconds(cell) for name, cell in row.items() if re.search("[0-9] [mu]?s", cell)}
            step = parts.pop(whole)
            assert sum(parts.values()) == pytest.approx(step, rel=1e-3)


def in_seconds(cell: str) -> float:
    value, unit, *_ = cell.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_accuracies_of_synthetic_images_are_not_shown() -> None:
    text = section(run(CPU), "Q4: accuracy with a large batch")
    assert "Synthetic images: accuracies mean nothing" in text
    assert "%" not in text
    assert "81.5%" in section(run(REPORTS), "Q4: trainings of reports")


def test_what_reports_state_is_beside_the_same_training_here() -> None:
    """Reports A and B state training accuracies of the same training with a small batch."""
    small, *_ = rows_in(run(REMEDIES), "Q4: trainings beside what reports state")
    assert small == {
        "training": "128, as it is",
        "figure": "train accuracy",
        "here": "72.5%",
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
        assert missing <= {"price", "extra price", "a saved hour", "model", "control"}, question.title
