"""Tables as lines of plain text that fit the width of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest

from ddpperf.report.tables import Column, Table

GAP = "  "  # between two columns
WIDEST_HEADING = 16  # characters; a longer heading takes several lines
ENOUGH_FIGURES = 5  # columns; if fewer fit, the texts of other columns are joined, and then take more lines
WIDEST, LEAST_TEXT = 1000, 16  # characters


def table_lines(table: Table, width: int, *, notes: bool) -> list[str]:
    """Return the lines of a table, without the last columns if they do not fit the width.

    notes: whether explanations follow.
    """
    marks = tuple(f"!{','.join(map(str, numbers))}" if numbers else "" for numbers in table.marks)
    if len(table.tests) == 1:
        return _row_by_row(table, width, notes=notes)
    last = (Column(heading="", cells=marks, is_text=True),) if any(marks) else ()
    properties: Sequence[Column] = table.properties
    common = [*table.common]
    enough = table.figures[:ENOUGH_FIGURES]
    figures = _fitting(properties, table.figures, last, width)
    long = WIDEST  # characters of a text, which has more lines if the figures need its room
    if len(figures) < len(enough):
        properties = _joined(properties)
        usual = next((column.usual for column in table.properties if column.heading == "strategy"), "")
        common += [f"{usual} unless named"] * bool(usual)
        figures = _fitting(properties, table.figures, last, width)
    if len(figures) < len(enough):
        figures = list(enough)
        others = [column for column in properties if not column.is_text]
        long = max(LEAST_TEXT, width - sum(map(_needed, (*others, *enough, *last))) - 2 * len(GAP))
    columns = [*properties, *figures, *last]
    texts = {place for place, column in enumerate(columns) if column.is_text}
    headings = [_heading(column) for column in columns]
    height = max(map(len, headings), default=0)
    above = [[""] * (height - len(heading)) + heading for heading in headings]
    rows = [*zip(*above, strict=True)]
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = [wrapped(cell, long) if place in texts else [cell] for place, cell in enumerate(row)]
        rows += zip_longest(*cells, fillvalue="")
    lines = aligned(rows, [place for place in range(len(columns)) if place not in texts])
    if max(map(len, lines)) > width:
        return _row_by_row(table, width, notes=notes)
    title = GAP.join(filter(None, (table.title.upper(), ", ".join(common))))
    if height > 1 and not lines[0][: len(title) + len(GAP)].strip():
        lines[0] = title + lines[0][len(title) :]
    else:
        lines = [*wrapped(title, width), *lines]
    return lines + _below(table, width, notes=notes)


def _below(table: Table, width: int, *, notes: bool) -> list[str]:
    """Return what stands below a table: warnings and notes."""
    warnings = [f"!{number} {warning}" for number, warning in table.warnings.items()]
    below = [*warnings, *(table.notes if notes else ())]
    return [line for text in below for line in wrapped(text, width, first="  ", indent=4)]


def _row_by_row(table: Table, width: int, *, notes: bool) -> list[str]:
    """Return a table as a line for each row: what it is if there are several, and its figures."""
    lines = wrapped(GAP.join(filter(None, (table.title.upper(), ", ".join(table.common)))), width)
    for row, marks in enumerate(table.marks):
        cells = [
            column.cells[row] if column.is_text else f"{column.heading} {column.cells[row]}"
            for column in table.properties
            if column.cells[row] != "-"
        ]
        mark = f" !{','.join(map(str, marks))}" if marks else ""
        what = f"{', '.join(cells)}: " if cells else ""
        figures = _figures_of_row(table.figures, row)
        lines += wrapped(f"{what}{figures}{mark}", width, first="  ", indent=4 if cells else 2)
    return lines + _below(table, width, notes=notes)


def _figures_of_row(columns: Sequence[Column], row: int) -> str:
    """Return the figures of a row, each behind its heading and with its unit."""
    figures = []
    for column in columns:
        value, _, interval = column.cells[row].partition(" (")
        unit = column.unit if value[-1:].isdigit() else ""
        ends = f"({interval}" if interval else ""
        figures.append(" ".join(filter(None, (column.heading, value, unit, ends))) if value != "-" else "")
    return ", ".join(filter(None, figures))


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


def _joined(properties: Sequence[Column]) -> list[Column]:
    """Return the columns with all texts in one column, without those that are usual."""
    texts = [column for column in properties if column.is_text and column.heading]
    cells = zip(*(column.cells for column in texts), strict=True)
    usual = ["-", *(column.usual for column in texts)]
    joined = tuple(", ".join(cell for cell in row if cell not in usual) or "-" for row in cells)
    heading = ", ".join(column.heading for column in texts)
    return [
        *(column for column in properties if column not in texts),
        *([Column(heading=heading, cells=joined, is_text=True)] if texts else []),
    ]


def wrapped(text: str, width: int, *, indent: int = 2, first: str = "") -> list[str]:
    """Return text as lines of at most `width` characters; all but the first line are indented."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def _heading(column: Column) -> list[str]:
    """Return the lines of a column's heading, with its unit."""
    words = textwrap.wrap(column.heading, WIDEST_HEADING, break_long_words=False)
    if column.unit and words and len(words[-1]) + 1 + len(column.unit) <= WIDEST_HEADING:
        words[-1] += f" {column.unit}"
    elif column.unit:
        words.append(column.unit)
    return words


def _needed(column: Column) -> int:
    """Return the characters of a line that a column takes."""
    return len(GAP) + max(map(len, (*_heading(column), *column.cells)))


def _fitting(
    properties: Sequence[Column], figures: Sequence[Column], last: Sequence[Column], width: int
) -> list[Column]:
    """Return the first columns of `figures` that fit on a line with the other columns."""

    used = sum(map(_needed, (*properties, *last))) - len(GAP)
    fitting: list[Column] = []
    for column in figures:
        used += _needed(column)
        if used > width and fitting:
            break
        fitting.append(column)
    return fitting
