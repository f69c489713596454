"""The table of a run with two sides: a row a test, and one for whatever else of it got worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.report.format import aligned, short
from ddpperf.results import metrics

COLUMNS: tuple[str, ...] = (
    "test",
    "metric",
    "base",
    "candidate",
    "ratio",
    "95% interval",
    "detectable",
    "finding",
    "outcome",
)
FIGURES = range(2, 7)
TOLD = ("worse", "suspect")  # findings of metrics that a test does not stand for


def two_sides(header: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a run says of its two sides, which measured all of it, or a comparison's suspects; None without them."""
    told: Mapping[str, Any] | None = header.get("against") or header.get("confirmed")
    return told


def against_lines(
    header: Mapping[str, Any], warnings: Mapping[str, Sequence[str]], *, only_judged: bool
) -> list[str]:
    """The table, and what its words mean, as lines without markup. only_judged: without the tests that have no row."""
    told = two_sides(header)
    if told is None:
        return []
    rows: list[tuple[str, ...]] = [COLUMNS]
    for test, outcome in header["outcomes"].items():
        ended = f"{outcome['kind']}, doubtful" if warnings.get(test) else outcome["kind"]
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


def every_metric(told: Mapping[str, Any]) -> list[str]:
    """All that was measured of both sides, test by test a row for each metric, as lines without markup."""
    tests = list(dict.fromkeys(row["test"] for row in told["rows"]))
    rows = sorted(told["rows"], key=lambda row: tests.index(row["test"]))
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
    """What was found, by the fresh sets of a second look or not; what cannot fail the run is for information."""
    if row["control"] is not None:
        return str(row["finding"])
    if not row["gated"]:
        return "for information"
    return f"{row['finding']}, second look" if row["confirmed"] else str(row["finding"])


def _value(metric: str, value: float) -> str:
    try:
        return metrics.find(metric).format(value)
    except KeyError:  # of a suite that is not here
        return f"{value:.4g}"


def _described(side: Mapping[str, Any]) -> str:
    """What makes a side another than this environment."""
    parts = [side["python"]]
    parts += [f"torch {side['torch']}"] if side.get("torch") else []
    parts += [f"code in {side['root']}"] if side["root"] else []
    parts += [
        f"{name}={value}" for name, value in (*side["environment"].items(), *side.get("spec", {}).items())
    ]
    return ", ".join(parts)
