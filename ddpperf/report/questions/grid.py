"""Grids as reports print them: devices as rows, batch sizes as groups of columns, one grid for each setup.

A setup is everything that a grid's cases have in common, such as the model and the strategy. It stands
in the caption, with the machine. A step on one device has no strategy, so it is in the grids of all
strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ddpperf.machine.links import rates_in_words
from ddpperf.report.questions.figures import devices_of
from ddpperf.report.questions.question import BATCHES, DEVICES, Entry, Question
from ddpperf.report.stored_cases import Case, in_words
from ddpperf.report.terminal_tables import wrapped

WIDTH = 110  # characters of a line
NOTHING = "-"
Numbers = dict[str, int]  # of warnings, by their texts


def grid_lines(cases: Sequence[Case], question: Question, numbers: Numbers) -> list[str]:
    """Return the lines of all grids of these cases, each with its caption and its warnings.

    A grid that is wider than a line continues below. A warning keeps its number in all grids.
    """
    entries = [entry for case in cases for entry in question.entries(case)]
    devices = devices_of(cases[0])
    rows, groups = (
        [devices if name == DEVICES else name for name in names] for names in (question.rows, question.groups)
    )
    lines: list[str] = []
    for setup, found in _setups(entries, (*rows, *groups)).items():
        lines += [*wrapped(_caption(setup, found[-1].case), WIDTH, indent=0), ""]
        sizes = Counter(_values(entry, groups) for entry in found)
        by_size = sorted(found, key=lambda entry: -sizes[_values(entry, groups)])
        places = _in_order(_values(entry, rows) for entry in by_size)
        named_axes = zip(rows, *places, strict=True)
        labels: list[Column] = [axis for axis in named_axes if {*axis[1:]} != {NOTHING}]
        parts: list[Part] = []
        for group in _in_order(_values(entry, groups) for entry in found):
            of_group = {_values(entry, rows): entry for entry in found if _values(entry, groups) == group}
            columns = _columns([of_group.get(place) for place in places], numbers)
            parts += [(", ".join(value for value in group if value != NOTHING), columns)] if columns else []
        batch = next((name for name in groups if name in BATCHES and found[0].properties.get(name)), "")
        for table in _tables(labels, parts, batch):
            by_row = list(zip(*table, strict=True))
            shown = [row for row in by_row if {*row[len(labels) :]} != {NOTHING}]
            lines += [*markdown_table(*shown), ""]
        warnings = {numbers[warning]: warning for entry in found for warning in entry.case.warnings}
        for number, warning in sorted(warnings.items()):
            lines += wrapped(f"- !{number} {warning}", WIDTH)
        lines += [""] * bool(warnings)
    return lines


Setup = tuple[tuple[str, str], ...]
Column = tuple[str, ...]  # the heading, and a cell for each row
Part = tuple[str, list[Column]]  # the name of a group, and its columns


def _values(entry: Entry, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(entry.properties.get(name) or NOTHING for name in names)


def _setups(entries: Sequence[Entry], axes: Sequence[str]) -> dict[Setup, list[Entry]]:
    """Return the entries of each grid by what they have in common."""
    found: dict[Setup, list[Entry]] = {}
    places = set()
    for entry in entries:
        setup = tuple((name, value) for name, value in entry.properties.items() if value and name not in axes)
        place = _values(entry, axes)
        if (setup, place) in places:  # the cases differ in something that has no property
            setup += (("test", entry.case.test),)
        places.add((setup, place))
        found.setdefault(setup, []).append(entry)
    for setup in [setup for setup in found if "strategy" not in dict(setup)]:
        same = [other for other in found if other != setup and _without_strategy(other) == setup]
        for other in same:
            found[other] = [*found[setup], *found[other]]
        if same:
            del found[setup]
    return found


def _without_strategy(setup: Setup) -> Setup:
    return tuple((name, value) for name, value in setup if name != "strategy")


def _in_order(values: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the different values by their numbers; words stay in the order of the cases."""
    return sorted(dict.fromkeys(values), key=lambda row: [_number(value) for value in row])


def _number(value: str) -> int:
    digits = value.replace(",", "")
    return int(digits) if digits.isdecimal() else 0


def _columns(row: Sequence[Entry | None], numbers: Numbers) -> list[Column]:
    """Return the columns of a group that have a figure; the first one has the marks of the warnings."""
    columns: list[Column] = []
    for heading in dict.fromkeys(heading for entry in row if entry for heading in entry.figures):
        texts = [entry.figures.get(heading, "") if entry else "" for entry in row]
        if any(texts) and not columns:
            pairs = zip(texts, row, strict=True)
            texts = [_marked(text, entry.case, numbers) if entry else "" for text, entry in pairs]
        if any(texts):
            columns.append((heading, *(text or NOTHING for text in texts)))
    return columns


def _marked(text: str, case: Case, numbers: Numbers) -> str:
    marks = [numbers.setdefault(warning, len(numbers) + 1) for warning in case.warnings]
    return f"{text} !{','.join(map(str, sorted(marks)))}" if marks and text else text


def _tables(labels: list[Column], parts: Iterable[Part], batch: str) -> list[list[Column]]:
    """Return the columns of each table: as many groups as fit on a line beside the labels of the rows.

    A group that is wider than a line continues in the next table. batch: what the first group's name
    is, "batch" or "global batch".
    """
    tables: list[list[Column]] = []
    for name, columns in parts:
        first = _named(f"{batch} {name}".lstrip(), columns)
        if tables and _width([*tables[-1], *_named(name, columns)]) <= WIDTH:
            tables[-1] += _named(name, columns)
        elif _width([*labels, *first]) <= WIDTH:
            tables.append([*labels, *first])
        else:
            fitting = max(
                n for n in range(1, len(columns)) if n == 1 or _width([*labels, *first[:n]]) <= WIDTH
            )
            tables += _tables(labels, [(name, columns[:fitting])], batch)
            tables += _tables(labels, [(name, columns[fitting:])], batch)
    return tables


def _named(name: str, columns: list[Column]) -> list[Column]:
    (heading, *cells), *others = columns
    return [(f"{name}: {heading}" if name else heading, *cells), *others]


def _width(columns: Sequence[Column]) -> int:
    return max(len(markdown_table(row)[0]) for row in zip(*columns, strict=True))


def _caption(setup: Setup, case: Case) -> str:
    """Return what all cases of a grid have in common, and the machine."""
    environment = case.header["environment"]
    words = [in_words(name, value) for name, value in setup if name != "kind"]
    kinds = [f"{value} scaling" for name, value in setup if name == "kind"]
    gpus = Counter(gpu["name"] for gpu in environment.get("gpus", ()))
    machine = [f"{count} {name}" for name, count in gpus.items()]
    machine = machine or [f"{environment['cpu']}, {environment['cores']} cores"]
    machine += [
        rates_in_words(environment.get("links", ())),
        f"torch {environment.get('torch', '')}".rstrip(),
    ]
    return ", ".join(filter(None, [*kinds, *words, *machine])) + "."


def markdown_table(headings: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [head, "|---" * len(headings) + "|", *body]
