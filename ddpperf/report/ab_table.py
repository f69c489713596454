"""The table of an A/B run, with base and candidate of each test.

A row shows a test's primary metric, or another metric that got worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.report.text import aligned, short
from ddpperf.results import metrics

COLUMNS = ("test", "metric", "base", "candidate", "ratio", "95% interval", "detectable", "finding", "outcome")
FIGURES = range(2, 7)
SHOWN = ("worse", "suspect")  # findings that give a metric a row besides the test's primary metric


def two_sides(header: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the comparison of base and candidate in a stored run, or None if there is none."""
    found: Mapping[str, Any] | None = header.get("against") or header.get("confirmed")
    return found


def ab_lines(
    header: Mapping[str, Any], warnings: Mapping[str, Sequence[str]], *, only_judged: bool
) -> list[str]:
    """Return the lines of the table that compares base and candidate.

    only_judged: leave out tests that were not compared.
    """
    ab = two_sides(header)
    if ab is None:
        return []
    rows: list[tuple[str, ...]] = [COLUMNS]
    for test, outcome in header["outcomes"].items():
        ended = outcome["kind"] + (" !" if warnings.get(test) else "")
        found = [row for row in ab["rows"] if row["test"] == test]
        shown = [row for row in found if row["primary"] or (row["gated"] and row["finding"] in SHOWN)]
        without_row = [] if only_judged else [(short(test), *("-",) * (len(COLUMNS) - 2), ended)]
        rows += [_row(row, ended) for row in shown] or without_row
    rows += [_row(row, "") for row in ab["rows"] if row["control"] is not None]
    return [
        f"base: {_described(ab['base'])}",
        f"candidate: {_described(ab['candidate'])}",
        "",
        *aligned(rows, FIGURES),
        "",
        "ratio: candidate over base, of the means over process sets",
        "detectable: the smallest worsening that is found 19 times in 20; beside a stored run's code, the "
        "upper end of the interval",
    ]


def every_metric(ab: Mapping[str, Any]) -> list[str]:
    """Return a table of all metrics measured by base and candidate, ordered by test."""
    tests = list(dict.fromkeys(row["test"] for row in ab["rows"]))
    rows = sorted(ab["rows"], key=lambda row: tests.index(row["test"]))
    return aligned([COLUMNS[:-1], *(_row(row, "")[:-1] for row in rows)], FIGURES)


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
    """Return whether a metric got worse, or "for information" if it cannot fail the run."""
    if row["control"] is None and not row["gated"]:
        return "for information"
    confirmed = row["control"] is None and row["confirmed"]
    return f"{row['finding']}, repeated" if confirmed else str(row["finding"])


def _value(metric: str, value: float) -> str:
    try:
        return metrics.find(metric).format(value)
    except KeyError:  # registered by another suite
        return f"{value:.4g}"


def _described(side: Mapping[str, Any]) -> str:
    parts = [side["python"]]
    parts += [f"torch {side['torch']}"] if side.get("torch") else []
    parts += [f"code in {side['root']}"] if side["root"] else []
    fields = (*side["environment"].items(), *side.get("spec", {}).items())
    return ", ".join([*parts, *(f"{name}={value}" for name, value in fields)])
