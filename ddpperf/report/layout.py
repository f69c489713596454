"""Tables as lines of plain text that fit the width of a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

from ddpperf.io.terminal_text import printable
from ddpperf.report.tables import Column, Table

WIDEST_HEADING = 16  # characters; a longer heading takes several lines
ENOUGH_FIGURES = 5  # columns; if fewer fit, long texts in other columns are abbreviated
LONGEST_TEXT = 14  # characters of a text that is never abbreviated
MOST_LINES = 2  # of a sentence
GAP = "  "


def table_lines(table: Table, width: int, *, notes: bool) -> list[str]:
    """Return the lines of a table, without the last columns if they do not fit the width.

    A table of one row becomes a sentence. notes: whether explanations follow.
    """
    if len(table.tests) == 1:
        return [*_sentence(table, width), *_below(table, [], width, notes=notes)]
    marks = tuple(map(_marks, table.marks))
    last = (Column(heading="", cells=marks, is_text=True),) if any(marks) else ()
    properties: Sequence[Column] = table.properties
    meanings: list[str] = []
    figures = _fitting(properties, table.figures, last, width)
    if len(figures) < min(ENOUGH_FIGURES, len(table.figures)):
        properties, meanings = _abbreviated(properties)
        figures = _fitting(properties, table.figures, last, width)
    columns = [_Laid(column) for column in (*properties, *figures, *last)]
    height = max(len(column.heading) for column in columns)
    headings = [GAP.join(column.heading_line(line, height) for column in columns) for line in range(height)]
    rows = [GAP.join(column.cell(row) for column in columns) for row in range(len(table.tests))]
    title = _title(table)
    if height > 1 and not headings[0][: len(title) + len(GAP)].strip():
        headings[0] = title + headings[0][len(title) :]
    else:
        headings = [*wrapped(title, width), *headings]
    return [
        *(line.rstrip() for line in (*headings, *rows)),
        *_below(table, meanings, width, notes=notes),
    ]


def _below(table: Table, meanings: Sequence[str], width: int, *, notes: bool) -> list[str]:
    """Return the lines below a table: abbreviations, warnings and explanations."""
    warnings: list[str] = []
    for text in (f"!{number} {warning}" for number, warning in table.warnings.items()):
        if warnings and len(warnings[-1]) + len(text) + 2 * len(GAP) <= width:
            warnings[-1] += f"{GAP}{text}"  # short warnings share a line
        else:
            warnings.append(text)
    texts = [*meanings, *warnings, *(table.notes if notes else ())]
    return [line for text in texts for line in wrapped(text, width, first="  ", indent=4)]


def _abbreviated(properties: Sequence[Column]) -> tuple[list[Column], list[str]]:
    """Return columns whose long texts are abbreviated, and what the abbreviations mean."""
    short: dict[str, str] = {}
    columns = []
    for column in properties:
        for cell in column.cells if column.is_text and not column.is_name else ():
            first = f"{re.split('[-+:_ ]', cell)[0]}[{ascii_lowercase[len(short) % 26]}]"
            if len(first) < len(cell) > LONGEST_TEXT and cell not in short:
                short[cell] = first
        columns.append(replace(column, cells=tuple(short.get(cell, cell) for cell in column.cells)))
    return columns, [f"{abbreviation} {text}" for text, abbreviation in short.items()]


def wrapped(text: str, width: int, *, indent: int = 2, first: str = "") -> list[str]:
    """Return text as lines of at most `width` characters; all but the first line are indented."""
    lines = textwrap.wrap(
        printable(" ".join(text.splitlines())),
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


class _Laid:
    """A column with its width and the lines of its heading."""

    def __init__(self, column: Column) -> None:
        words = textwrap.wrap(column.heading, WIDEST_HEADING, break_long_words=False)
        if column.unit and words and len(words[-1]) + 1 + len(column.unit) <= WIDEST_HEADING:
            words[-1] += f" {column.unit}"
        elif column.unit:
            words.append(column.unit)
        self.heading = words
        self.width = max(map(len, (*words, *column.cells)), default=0)
        self._column = column

    def heading_line(self, line: int, height: int) -> str:
        """Return one line of the heading, whose last line is the line above the first row."""
        above = height - len(self.heading)
        return self._aligned(self.heading[line - above] if line >= above else "")

    def cell(self, row: int) -> str:
        return self._aligned(printable(self._column.cells[row]))

    def _aligned(self, text: str) -> str:
        return text.ljust(self.width) if self._column.is_text else text.rjust(self.width)


def _fitting(
    properties: Sequence[Column], figures: Sequence[Column], last: Sequence[Column], width: int
) -> list[Column]:
    """Return the first columns of `figures` that fit on a line with the other columns."""
    used = sum(_Laid(column).width + len(GAP) for column in (*properties, *last)) - len(GAP)
    fitting: list[Column] = []
    for column in figures:
        used += len(GAP) + _Laid(column).width
        if used > width and fitting:
            break
        fitting.append(column)
    return fitting


def _title(table: Table) -> str:
    return GAP.join(filter(None, (table.title.upper(), ", ".join(table.common))))


def _sentence(table: Table, width: int) -> list[str]:
    """Return a table's only row as text, without the last figures if they do not fit two lines."""
    figures = [column.sentence(0) for column in table.figures if column.cells[0] != "-"]
    while True:
        text = f"{_title(table)}: {', '.join(figures)} {_marks(table.marks[0])}".rstrip()
        lines = wrapped(text, width)
        if len(lines) <= MOST_LINES or len(figures) <= 1:
            return lines
        figures.pop()


def _marks(numbers: Sequence[int]) -> str:
    return f"!{','.join(map(str, numbers))}" if numbers else ""
