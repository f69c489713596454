"""The numbers that tables, summary and page print of six stored runs never change by accident.

tests/frozen/numbers.json holds, for each run, the text of each metric of each case, and the numbers in
the printed outputs. Words, order and layout may change. After a change on purpose,
write the file again and say in the commit which numbers changed and why:

    python -m tests.unit.test_frozen_numbers
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddpperf.report.html_page import page
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import summary_lines, verdict_lines
from ddpperf.report.tables import tables_of
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.stored_runs import read_document
from tests.project import REPOSITORY

FROZEN = REPOSITORY / "tests" / "frozen" / "numbers.json"
RUNS = (
    "perf/baselines/cpu2-epyc-25-17-1/0014_core",
    "docs/runs/cpu2-gate_all",
    "perf/baselines/h200x1/0003_core",
    "perf/baselines/h100-80gb-hbm3x2/0005_core",
    "perf/baselines/h100-80gb-hbm3x4/0005_core",
    "docs/runs/h200x1-reports",
)
# At least three digits: fewer would be found anywhere.
NUMBER = re.compile(r"\d[\d,]*\.\d\d+|\d\d[\d,]*\.\d|\d[\d,]{2,}|\d\d\.\d|\d\.\d")


@cache
def document_of(run: str) -> dict[str, Any]:
    (path,) = (REPOSITORY / run).parent.glob(f"{Path(run).name}.json*")
    document: dict[str, Any] = read_document(path)
    return document


@cache
def frozen() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FROZEN.read_text())
    return found


def metrics_of(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the printed text of each metric, by test id and metric."""
    return {
        benchmark["fullname"]: {
            name: find_or_plain(name, metric["unit"]).text(metric["value"])
            for name, metric in benchmark["extra_info"]["ddpperf"]["metrics"].items()
        }
        for benchmark in document["benchmarks"]
    }


def rows_of(document: dict[str, Any]) -> dict[str, list[str]]:
    """Return the printed numbers of each row of the tables, by test id, in any order."""
    found: dict[str, list[str]] = {}
    for table in tables_of(document):
        for row, test in enumerate(table.tests):
            cells = [f"{column.cells[row]} {column.unit}".strip() for column in table.figures]
            found[test] = sorted([*found.get(test, ()), *(cell for cell in cells if NUMBER.search(cell))])
    return found


def numbers_in(text: str) -> set[str]:
    return set(NUMBER.findall(text))


@cache
def outputs_of(run: str) -> dict[str, str]:
    """Return the texts that a user reads, without pictures and styles."""
    document = document_of(run)
    with mock.patch("ddpperf.report.html_page.pictures_of", return_value=[]):  # they hold no text of the page
        html = re.sub(r"(?s)<style.*?</style>|<[^>]*>", " ", page(document))
    return {
        "summary": " ".join(summary_lines(document)),
        "verdict": " ".join(verdict_lines(document["ddpperf"])),
        "tables": report_tables(document),
        "page": html,
    }


@pytest.mark.parametrize("run", RUNS)
def test_each_metric_prints_its_frozen_value(run: str) -> None:
    assert metrics_of(document_of(run)) == frozen()[run]["metrics"]


@pytest.mark.parametrize("run", RUNS)
def test_rows_of_tables_have_their_frozen_numbers(run: str) -> None:
    assert rows_of(document_of(run)) == frozen()[run]["rows"]


@pytest.mark.parametrize("run", RUNS)
def test_outputs_show_the_frozen_numbers(run: str) -> None:
    for name, text in outputs_of(run).items():
        assert numbers_in(text) == set(frozen()[run]["numbers"][name]), name


def freeze() -> None:
    """Write the numbers that are printed now."""
    content = {
        run: {
            "numbers": {name: sorted(numbers_in(text)) for name, text in outputs_of(run).items()},
            "metrics": metrics_of(document_of(run)),
            "rows": rows_of(document_of(run)),
        }
        for run in RUNS
    }
    FROZEN.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    freeze()
