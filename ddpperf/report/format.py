"""Metrics and tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddpperf.results import metrics


def short(test: str) -> str:
    """Return a test's id without its file."""
    return test.split("::", 1)[-1]


def format_metric(name: str, value: float, unit: str = "") -> str:
    """Return a metric's heading and value, or its name and plain number if another suite registered it."""
    try:
        return metrics.find(name).text(value)
    except KeyError:
        return f"{name} {value:.4g} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], figures: Collection[int]) -> list[str]:
    """Return a table's lines: words to the left of their column, the columns of `figures` to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.rjust(width) if column in figures else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
