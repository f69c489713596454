"""Formatting of metrics, tables and lists as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ddpperf.results.metrics import find_or_plain

GAP = "  "  # between two columns


def without_file(test: str) -> str:
    """Return a test id without the name of its file."""
    return test.split("::", 1)[-1]


def function_of(test: str) -> str:
    """Return the name of a test's function, such as test_weak_scaling."""
    return test.rpartition("::")[-1].partition("[")[0]


def metric_texts(stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the heading and the value of each stored metric as text.

    A metric of another test suite is shown with its name and unit.
    """
    return [find_or_plain(name, metric["unit"]).text(metric["value"]) for name, metric in stored.items()]


def aligned(rows: Sequence[tuple[str, ...]], figures: Collection[int]) -> list[str]:
    """Return the lines of a table with aligned columns.

    figures: the columns that are aligned to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        GAP.join(
            text.rjust(width) if column in figures else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [head, "|---" * len(headings) + "|", *body]


def interval(row: Mapping[str, Any]) -> str:
    """Return the 95% interval of a stored row of an A/B run as text."""
    return f"{row['low']:.3f} to {row['high']:.3f}"


def finding(row: Mapping[str, Any]) -> str:
    """Return the finding of a stored row of an A/B run; `repeated` marks a repeated measurement."""
    if row["control"] is None and not row["gated"]:
        return "for information"
    return f"{row['finding']}{', repeated' if row['control'] is None and row['confirmed'] else ''}"


def ab_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a stored row of an A/B run, by heading."""
    return {
        "ratio": f"{row['ratio']:.3f}",
        "95% interval": interval(row),
        "finding": finding(row),
        "base": find_or_plain(row["metric"]).format(row["base"]),
        "candidate": find_or_plain(row["metric"]).format(row["candidate"]),
        "detectable": f"{row['detectable']:.1%}",
    }
