"""The table of a run with two sides: a row a test, and one for whatever else of it got worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.report.format import aligned, format_seconds, short

COLUMNS: tuple[str, ...] = ("test", "metric", "base", "candidate", "ratio", "95% interval", "detectable", "finding", "outcome")
FIGURES = range(2, 7)
TOLD = ("worse", "suspect")  # findings of metrics that a test does not stand for


def against_lines(header: Mapping[str, Any], doubts: Mapping[str, Sequence[str]], *, only_judged: bool) -> list[str]:
    """The table, and what its words mean, as lines without markup. only_judged: without the tests that have no row."""
    told = header["against"]
    rows: list[tuple[str, ...]] = [COLUMNS]
    for test, outcome in header["outcomes"].items():
        ended = f"{outcome['outcome']}, doubtful" if doubts.get(test) else outcome["outcome"]
        found = [row for row in told["rows"] if row["test"] == test]
        shown = [row for row in found if row["primary"] or (row["gated"] and row["finding"] in TOLD)]
        unseen = [] if only_judged else [(short(test), *("-",) * (len(COLUMNS) - 2), ended)]
        rows += [_row(row, ended) for row in shown] or unseen
    rows += [_row(row, "") for row in told["rows"] if row["control"] is not None]
    return [
        f"base: {_described(told['base'])}",
        f"candidate: {_described(told['candidate'])}",
        "",
        *aligned(rows, FIGURES),
        "",
        "ratio: candidate over base, of the sets' means; detectable: the least change for the worse found 19 times in 20",
    ]


def _row(row: Mapping[str, Any], ended: str) -> tuple[str, ...]:
    return (
        short(row["test"]),
        row["metric"],
        _value(row["metric"], row["base"]),
        _value(row["metric"], row["candidate"]),
        f"{row['ratio']:.3f}",
        f"{row['low']:.3f} to {row['high']:.3f}",
        f"{row['detectable']:.1%}",
        _finding(row),
        ended,
    )


def _finding(row: Mapping[str, Any]) -> str:
    """What was found, by the fresh sets of a second look or not; what cannot fail the run is for information."""
    if row["control"] is not None:
        return str(row["finding"])
    if not row["gated"]:
        return "for information"
    return f"{row['finding']}, second look" if row["look"] > 1 else str(row["finding"])


def _value(metric: str, value: float) -> str:
    if metric == "time" or metric.endswith("_seconds"):
        return format_seconds(value)
    return f"{value / 1e9:.4g} GB" if metric.endswith("_bytes") else f"{value:.4g}"


def _described(side: Mapping[str, Any]) -> str:
    """What makes a side another than this environment."""
    parts = [side["python"]]
    parts += [f"code in {side['root']}"] if side["root"] else []
    parts += [f"{name}={value}" for name, value in (*side["environment"].items(), *side.get("spec", {}).items())]
    return ", ".join(parts)
