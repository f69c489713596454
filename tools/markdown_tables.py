"""What several scripts of tools/ need: the project's root, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpperf.report.questions.grid import markdown_table

ROOT = Path(__file__).parents[1]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([*markdown_table(headings, *rows), ""])
