"""Grids as reports print them: devices as rows, batch sizes as groups of columns, one grid for each setup.

A setup is what all cases of a grid share, such as the model. It is the caption. A step on one device has
no strategy, so the grid of each strategy repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ddpperf.machine.links import rates_in_words
from ddpperf.report.questions.figures import devices_of
from ddpperf.report.questions.question import BATCHES, DEVICES, Entry, Question
from ddpperf.report.stored_cases import Case, all_in_words, in_words
from ddpperf.report.terminal_tables import wrapped

WIDTH = 110  # characters of a line
NOTHING = "-"
Numbers = dict[str, int]  # of warnings, by their texts


def grid_lines(entries: Sequence[Entry], question: Question, numbers: Numbers) -> list[str]:
    """Return the lines of all grids of these cases, each with its caption and its warnings.

    A grid that is wider than a line continues below. A warning keeps its number in all grids.
    """
    devices = devices_of(entries[0].case)
    rows = [devices if name == DEVICES else name for name in question.rows]
    groups = question.groups
    lines: list[str] = []
    for setup, found in _setups(entries, (*rows, *groups)).items():
        lines += [*wrapped(_caption(setup, found[-1].case), WIDTH, indent=0), ""]
        by_place = {(_values(entry, groups), _values(entry, rows)): entry for entry in found}
        sizes = Counter(group for group, _ in by_place)
        places = _in_order(place for _, place in sorted(by_place, key=lambda at: -sizes[at[0]]))
        labels = _known(list(zip(rows, *places, strict=True)))
        parts: list[Part] = []
        for group in _in_order(group for group, _ in by_place):
            if columns := _columns([by_place.get((group, place)) for place in places], numbers):
                known = [pair for pair in zip(groups, group, strict=True) if pair[1] != NOTHING]
                words = [in_words(*pair) if pair[0] == "input" else pair[1] for pair in known]
                parts.append((", ".join(words), columns))
        batch = next((name for name in groups if name in BATCHES and found[0].properties.get(name)), "")
        for table in _tables(labels, parts, batch):
            by_row = list(zip(*table, strict=True))
            shown = [row for row in by_row if {*row[len(labels) :]} != {NOTHING}]
            lines += [*markdown_table(*shown), ""]
        warnings = {numbers[text]: text for entry in found for text in entry.warnings if text in numbers}
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
        others = [other for other in found if other != setup]
        same = [other for other in others if tuple(pair for pair in other if pair[0] != "strategy") == setup]
        alone = found.pop(setup) if same else []
        for other in same:
            found[other] = [*alone, *found[other]]
    return found


def _in_order(values: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the different values by their numbers; words stay in the order of the cases."""
    return sorted(dict.fromkeys(values), key=lambda row: [_number(value) for value in row])


def _number(value: str) -> int:
    digits = value.replace(",", "")
    return int(digits) if digits.isdecimal() else 0


def _columns(row: Sequence[Entry | None], numbers: Numbers) -> list[Column]:
    """Return the columns of a group that have a figure. A row's first figure has marks of its warnings."""
    figures = [dict(entry.figures) if entry else {} for entry in row]
    headings = dict.fromkeys(heading for found in figures for heading in found)
    for entry, found in zip(row, figures, strict=True):
        for first in [heading for heading, text in found.items() if text][:1]:
            found[first] += _marks(entry, numbers)
    return _known([(heading, *(found.get(heading) or NOTHING for found in figures)) for heading in headings])


def _known(columns: Iterable[Column]) -> list[Column]:
    return [column for column in columns if {*column[1:]} != {NOTHING}]


def _marks(entry: Entry | None, numbers: Numbers) -> str:
    found = [numbers.setdefault(text, len(numbers) + 1) for text in (entry.warnings if entry else ())]
    return f" !{','.join(map(str, sorted(found)))}" if found else ""


def _tables(labels: list[Column], parts: Iterable[Part], batch: str) -> list[list[Column]]:
    """Return the columns of each table: as many groups as fit on a line beside the labels of the rows.

    A group that is wider than a line continues in the next table. batch: what the first group's name
    is, "batch" or "global batch".
    """
    tables: list[list[Column]] = []
    for name, columns in parts:
        first, next_one = (_named(words, columns) for words in (f"{batch} {name}".lstrip(), name))
        if tables and _width([*tables[-1], *next_one]) <= WIDTH:
            tables[-1] += next_one
        elif len(columns) == 1 or _width([*labels, *first]) <= WIDTH:
            tables.append([*labels, *first])
        else:
            sizes = range(2, len(columns))
            fitting = max((n for n in sizes if _width([*labels, *first[:n]]) <= WIDTH), default=1)
            for some in (columns[:fitting], columns[fitting:]):
                tables += _tables(labels, [(name, some)], batch)
    return tables


def _named(name: str, columns: list[Column]) -> list[Column]:
    """Return the columns of a group with its name in the first heading."""
    (heading, *cells), *others = columns
    return [(f"{name}: {heading}" if name else heading, *cells), *others]


def _width(columns: Sequence[Column]) -> int:
    return max(len(markdown_table(row)[0]) for row in zip(*columns, strict=True))


def _caption(setup: Setup, case: Case) -> str:
    """Return what all cases of a grid have in common, and the machine."""
    environment = case.header["environment"]
    words = all_in_words(dict(setup), without=("kind",))
    kinds = [f"{value} scaling" for name, value in setup if name == "kind"]
    gpus = Counter(gpu["name"] for gpu in environment.get("gpus", ()))
    machine = [f"{count} {name}" for name, count in gpus.items()]
    machine = machine or [f"{environment['cpu']}, {environment['cores']} cores"]
    nodes = len(environment.get("nodes", ()))
    machine[0] = f"{nodes} nodes, each with {machine[0]}" if nodes > 1 else machine[0]
    software = f"torch {environment.get('torch', '')}".rstrip()
    links = rates_in_words(environment.get("links", ()))
    return ", ".join(filter(None, [*kinds, *words, *machine, links, software])) + "."


def markdown_table(headings: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in (headings, *rows))
    head, *body = [f"| {' | '.join(cells)} |" for cells in escaped]
    return [head, "|---" * len(headings) + "|", *body]
