"""Metrics, tables and lists as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpperf.results import metrics


def short(test: str) -> str:
    """Return a test's id without its file."""
    return test.split("::", 1)[-1]


def format_metric(name: str, value: float, unit: str = "") -> str:
    """Return a metric's heading and value, or its name and number if another suite registered it."""
    try:
        return metrics.find(name).text(value)
    except KeyError:
        return f"{name} {value:.4g} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], figures: Collection[int]) -> list[str]:
    """Return a table's lines, with the columns of `figures` aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.rjust(width) if column in figures else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def outcome_text(kind: str, warnings: Sequence[str] | None) -> str:
    """Return how a test ended, with a ! if there are warnings about it."""
    return f"{kind} !" if warnings else kind


def grouped(texts: Mapping[str, Sequence[str]], prefix: str = "") -> list[str]:
    """Return a line for each text, with the test that has it, or how many tests have it."""
    tests: dict[str, list[str]] = {}
    for test, found in texts.items():
        for text in found:
            tests.setdefault(text, []).append(short(test))
    return [
        f"{prefix}{text}: {named[0] if len(named) == 1 else f'{len(named)} tests'}"
        for text, named in sorted(tests.items())
    ]
