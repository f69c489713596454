"""The tables of a report where no frozen run has their figures (test_frozen_numbers.py)."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from ddpperf.report.questions import QUESTIONS, report_tables
from ddpperf.results.stored_runs import read_document

ROOT = Path(__file__).parents[2]
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
LAWS = ROOT / "docs" / "runs" / "h200x4-own_ddp.json.gz"
Json = dict[str, Any]


@cache
def run(path: Path) -> Json:
    document: Json = read_document(path)
    return document


def section(document: Json, title: str) -> str:
    return report_tables(document).split(f"## {title}\n")[1].split("\n## ")[0]


def rows_in(document: Json, title: str) -> list[dict[str, str]]:
    table = section(document, title).splitlines()
    lines = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_impossible_fraction_is_explained() -> None:
    """Amdahl's law divides by zero on 16 devices with this fraction."""
    document = copy.deepcopy(run(LAWS))
    for test in document["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if "serial_fraction" in metrics:
            metrics["serial_fraction"]["value"] = -1 / 15
    meaning = "a serial fraction of -6.7% means that speedups exceed the number of devices: "
    assert f"Gustafson's law, batch 32 per rank: {meaning}" in section(document, "Laws of scaling")
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
    (figures,) = rows_in(document, "Cost of a whole training")
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
    text = report_tables(with_part_speedups()).split("## Speedup of the parts of a step\n")[1]
    head, _, *found = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    assert head == "| training | part | 1 rank | 2 ranks | 4 ranks | speedup on 2 | speedup on 4 |"
    work = "| weak scaling, batch 32 per rank |"
    assert found == [
        f"{work} forward | 10.00 ms | 10.00 ms | 10.00 ms | 2.00x | 4.00x |",
        f"{work} backward | 30.00 ms | 40.00 ms | 40.00 ms | 1.50x | 3.00x |",
        f"{work} gradient sync | - | 20.00 ms | 40.00 ms | - | - |",
        f"{work} all parts | 40.00 ms | 70.00 ms | 90.00 ms | 1.14x | 1.78x |",
    ]
