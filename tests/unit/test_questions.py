"""The tables of a report where no frozen run has their figures (test_frozen_numbers.py)."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ddpperf.report.questions import QUESTIONS, report_tables
from ddpperf.report.questions.grid import WIDTH
from ddpperf.results.stored_runs import read_document

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
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
    assert {row["predicted speedup"] for row in found} == {"-"}


# --- costs


def test_price_is_that_of_the_device_time() -> None:
    """Two devices for 45 minutes, and 60 minutes on one: 30 extra device-minutes for 15 saved ones."""
    document = copy.deepcopy(run(CPU))
    document["ddpperf"]["options"]["gpu_hour_price"] = 2.0
    (test,) = [test for test in document["benchmarks"] if test["name"].startswith("test_large_batch")]
    for name, seconds in (("device", 5400.0), ("saved", 900.0), ("extra_device", 1800.0)):
        metric = {"value": seconds, "unit": "s", "by_set": {"A1": seconds}}
        test["extra_info"]["ddpperf"]["metrics"][f"{name}_seconds_of_training"] = metric
    figures = {
        name: cell for row in rows_in(document, "Cost of a whole training") for name, cell in row.items()
    }
    assert figures["device-minutes per training"] == "90.0000"
    assert figures["extra device-hours per saved hour"] == "2.000"
    assert (figures["price"], figures["price of a saved hour"]) == ("3.00", "4.00")


def test_tests_that_failed_before_their_metrics_answer_nothing() -> None:
    """Their time is stored, and the tables of the other tests are still printed."""
    document = copy.deepcopy(run(CPU))
    for test in document["benchmarks"]:
        if not test["name"].startswith("test_weak_scaling"):
            test["extra_info"]["ddpperf"]["metrics"] = {}
    text = report_tables(document)
    assert "36.9%" in text
    assert text.count("\n- ") == len(QUESTIONS) - 2, "weak scaling answers two"


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
    text = section(run(SUITE), "Q2: time and speedup by batch size and devices, weak scaling")
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
    _, eager, *_ = section(run(SUITE), "Q2: time and speedup by batch size and devices, weak scaling").split(
        "weak scaling, "
    )[1:]
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
    assert "81.5%" in section(run(REPORTS), "Q4: accuracy with a large batch")


def test_each_reports_accuracy_has_its_own_column() -> None:
    """Reports A and B state training accuracies of the same training with a small batch."""
    found = rows_in(run(REMEDIES), "Q4: accuracy with a large batch")
    for report, accuracy in (("A", "84.9%"), ("B", "82.2%")):
        assert accuracy in {row.get(f"report {report}'s train accuracy") for row in found}


def test_scaling_grid_follows_from_the_stored_rounds() -> None:
    """Computed again from the seconds of each rank in each round: N t(1) / t(N) of the slowest device."""
    expected = set()
    for test in run(SUITE)["benchmarks"]:
        stored = test["extra_info"]["ddpperf"]
        if test["fullname"].startswith("perf/test_scaling.py::test_weak_scaling["):
            N, step = (
                stored["spec"]["world_size"],
                median(map(max, seconds_of(stored, stored["spec"]["world_size"]))),
            )
            speedup = ""
            if N > 1:
                alone = zip(*seconds_of(stored["references"]["one_device"], N), strict=True)
                speedup = f"{N * max(map(median, alone)) / step:.2f}x"
            expected.add((str(N), f"{1e3 * step:#.4g} ms", speedup or "-"))
    found = set()
    title = "Q2: time and speedup by batch size and devices, weak scaling"
    for line in section(run(SUITE), title).splitlines():
        devices, *cells = line.strip("| ").split(" | ")
        if line.startswith("|") and devices.isdecimal():
            steps = [re.sub(" !.*", "", cell) for cell in cells[::3]]
            found |= set(zip([devices] * len(steps), steps, cells[2::3], strict=True))
    assert found - {("1", "-", "-"), ("2", "-", "-"), ("4", "-", "-")} == expected


def seconds_of(stored: Json, ranks: int) -> list[list[float]]:
    """Return the seconds of a step on each of the first ranks, for each round."""
    (sample,) = stored["samples"]
    return [
        [seconds / stored["iterations"] for seconds in of_round[:ranks]] for of_round in sample["seconds"]
    ]
