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
FINDINGS = {
    "unchanged": "not worse",
    "better": "not worse",
    "suspect": "undecided",
}  # others keep their names
# The ratio, its interval, the finding, and whether it is suspicious
Finding = tuple[float, float | None, float | None, str, bool]


def as_written(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "ddpperf"
    ]
    return header


RUNS = [path for path in STORED if as_written(path)["schema"] == 2]


def found_ab(header: dict[str, Any]) -> dict[tuple[str, str], Finding]:
    rows = (header.get("against") or header.get("confirmed") or {"rows": []})["rows"]
    return {
        (CONTROLS[row["control"]] or row["test"], row["metric"]): (
            *(row["ratio"], row["low"], row["high"]),
            FINDINGS.get(row["finding"], row["finding"])
            if row["gated"] or row["control"]
            else "for information",
            row["finding"] == "suspect" and bool(row["gated"] or row["control"]),
        )
        for row in rows
    }


def found_stored(header: dict[str, Any]) -> dict[tuple[str, str], Finding]:
    """What the stored time showed: undecided if a limit is exceeded, or if the time is too imprecise."""
    comparison = header.get("comparison") or {"changes": {}}
    found: dict[tuple[str, str], Finding] = {}
    for test, change in comparison["changes"].items():
        ratio, limit = change["now_seconds"] / change["then_seconds"], change["limit"] or float("inf")
        unclear = (change.get("noticed") or limit) > 1 + change["tolerance"]
        suspicious = change["judged"] and ratio > min(limit, change["suspect_limit"] or limit)
        finding = "undecided" if unclear or suspicious else "not worse"
        metric = "time" if change["quantity"] == "step" else "cpu_seconds"
        finding = finding if change["judged"] else "for information"
        found[test, metric] = (ratio, None, None, finding, suspicious)
    return found


@pytest.mark.parametrize("path", RUNS, ids=[path.name for path in RUNS])
def test_converted_run_keeps_its_ratios_and_findings(path: Path) -> None:
    written, header = as_written(path), read_document(path)["ddpperf"]
    assert header["schema"] == SCHEMA
    assert is_ab_run(header) == ("against" in written)
    rows = header.get("judged", {"rows": []})["rows"]
    found = {
        (row["control"] or row["tests"][0], row["metric"]): (
            *(row["ratio"], row["low"], row["high"]),
            row["finding"],
            row["suspicious"],
        )
        for row in rows
        if row["tests"] or "first" in row["stages"]
    }
    assert found == found_stored(written) | found_ab(written)
    stored = {
        (row["tests"][0], row["metric"]): row["stored_ratio"]
        for row in rows
        if row["tests"] and row["stored_ratio"] is not None
    }
    assert stored == {key: ratio for key, (ratio, *_) in found_stored(written).items()}
