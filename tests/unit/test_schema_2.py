"""Stored runs of schema 2, converted when read: each test keeps its ratio, and what was found of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddpperf.results.stored_runs import SCHEMA, is_ab_run, read_document
from tests.project import REPOSITORY

STORED = sorted([*REPOSITORY.glob("docs/runs/*.json.gz"), *REPOSITORY.glob("perf/baselines/*/*.json")])
CONTROLS = {None: None, "negative": "copy of memory", "positive": "delayed step"}
# Other findings keep their names
FINDINGS = {"unchanged": "not worse", "better": "not worse", "suspect": "undecided"}
FIELDS = ("ratio", "low", "high", "finding", "suspicious", "stored_ratio")


def as_written(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    header: dict[str, Any] = document["ddpperf"]
    return header


RUNS = [path for path in STORED if as_written(path)["schema"] == 2]


def expected_rows(header: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return the `FIELDS` of each row by test or control, and metric. A control has no stored ratio."""
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for test, change in (header.get("comparison") or {"changes": {}})["changes"].items():
        ratio, limit = change["now_seconds"] / change["then_seconds"], change["limit"] or float("inf")
        unclear = (change.get("noticed") or limit) > 1 + change["tolerance"]
        suspicious = change["judged"] and ratio > min(limit, change["suspect_limit"] or limit)
        finding = "undecided" if unclear or suspicious else "not worse"
        finding = finding if change["judged"] else "for information"
        metric = "time" if change["quantity"] == "step" else "cpu_seconds"
        found[test, metric] = (ratio, None, None, finding, suspicious, ratio)
    for row in (header.get("against") or header.get("confirmed") or {"rows": []})["rows"]:
        key = CONTROLS[row["control"]] or row["test"], row["metric"]
        judged, stored_ratio = bool(row["gated"] or row["control"]), found.get(key, (None,))[-1]
        finding = FINDINGS.get(row["finding"], row["finding"]) if judged else "for information"
        suspicious = judged and row["finding"] == "suspect"
        found[key] = (row["ratio"], row["low"], row["high"], finding, suspicious, stored_ratio)
    return found


@pytest.mark.parametrize("path", RUNS, ids=[path.name for path in RUNS])
def test_converted_run_keeps_its_ratios_and_findings(path: Path) -> None:
    written, header = as_written(path), read_document(path)["ddpperf"]
    assert header["schema"] == SCHEMA
    assert is_ab_run(header) == ("against" in written)
    found = {}
    for row in header.get("judged", {"rows": []})["rows"]:
        if row["control"] is None or "first" in row["stages"]:
            row["stored_ratio"] = row["stored_ratio"] if row["tests"] else None
            found[row["control"] or row["tests"][0], row["metric"]] = tuple(map(row.get, FIELDS))
    assert found == expected_rows(written)
