"""Grids as reports print them: devices as rows, batch sizes as groups of columns, one grid for each setup.

A setup is everything that a grid's cases have in common, such as the model and the strategy. It stands
in the caption, with the machine. A step on one device has no strategy, so it is in the grids of all
strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.machine.links import rates_in_words
from ddpperf.report.stored_cases import Case, in_words
from ddpperf.report.terminal_tables import wrapped
from ddpperf.results import units
from ddpperf.results.metrics import find
from ddpperf.specs import TrainingSpec

WIDTH = 110  # characters of a line
NOTHING = "-"
DEVICES = "devices"  # GPUs or ranks
BATCHES = ("batch", "global batch")
EACH_CASE = ()
Numbers = dict[str, int]  # of warnings, by their texts


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of a grid. text: returns the figure of a case, or "" if it has none."""

    heading: str
    text: Callable[[Case], str]


def figure(name: str, heading: str = "", *, per_epoch: bool = False) -> Figure:
    """Return the column of a metric. per_epoch: whether it is of a step, and shown for an epoch."""
    metric = find(name)

    def text(case: Case) -> str:
        value, spec = case.value(name), case.measured.spec
        steps = spec.steps_per_epoch if per_epoch and isinstance(spec, TrainingSpec) else 1
        return "" if value is None else metric.format(steps * value)

    return Figure(heading=heading or metric.heading, text=text)


def time_of(work: str) -> Figure:
    """Return the column of the measured time of a case. work: what is timed, such as "step"."""
    return Figure(heading=work, text=lambda case: units.seconds(case.seconds))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a grid shows of a case: its place by its properties, and its figures by their headings."""

    case: Case
    properties: Mapping[str, str]
    figures: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The axes of a grid.

    rows: the properties that distinguish the rows; EACH_CASE for a row for each case. groups: the
    properties of which each combination has a group of columns. figures: the columns of each group.
    entries: in place of `figures`, returns several entries of a case.
    """

    rows: tuple[str, ...] = (DEVICES,)
    groups: tuple[str, ...] = BATCHES
    figures: tuple[Figure, ...] = ()
    entries: Callable[[Case], Iterable[Entry]] | None = None

    def of(self, case: Case) -> Iterable[Entry]:
        if self.entries is not None:
            return self.entries(case)
        figures = {column.heading: column.text(case) for column in self.figures}
        assert len(figures) == len(self.figures), "two columns have one heading"
        return [Entry(case=case, properties=properties_of(case), figures=figures)]


def grid_lines(cases: Sequence[Case], shape: Shape, numbers: Numbers) -> list[str]:
    """Return the lines of all grids of these cases, each with its caption and its warnings.

    A grid that is wider than a line continues below. A warning keeps its number in all grids.
    """
    entries = [entry for case in cases for entry in shape.of(case)]
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    rows, groups = (
        [devices if name == DEVICES else name for name in names] for names in (shape.rows, shape.groups)
    )
    rows = rows or _distinguishing(entries)
    lines: list[str] = []
    for setup, found in _setups(entries, (*rows, *groups)).items():
        lines += [*wrapped(_caption(setup, found[-1].case), WIDTH, indent=0), ""]
        sizes = Counter(_values(entry, groups) for entry in found)
        by_size = sorted(found, key=lambda entry: -sizes[_values(entry, groups)])
        places = _in_order(_values(entry, rows) for entry in by_size)
        labels: list[Column] = list(zip(rows, *places, strict=True))
        columns = []
        for group in _in_order(_values(entry, groups) for entry in found):
            of_group = {_values(entry, rows): entry for entry in found if _values(entry, groups) == group}
            columns.append(_columns([of_group.get(place) for place in places], group, numbers))
        if not groups:  # a row for each case may continue below after any column
            columns = [[column] for column in columns[0]]
        batch = next((name for name in groups if name in BATCHES and found[0].properties.get(name)), "")
        for first, *others in _fitting(labels, filter(None, columns), WIDTH - len(batch)):
            named = (f"{batch} {first[0]}".lstrip(), *first[1:])
            lines += [*markdown_table(*zip(*labels, named, *others, strict=True)), ""]
        warnings = {numbers[warning]: warning for entry in found for warning in entry.case.warnings}
        for number, warning in sorted(warnings.items()):
            lines += wrapped(f"- !{number} {warning}", WIDTH)
        lines += [""] * bool(warnings)
    return lines


Setup = tuple[tuple[str, str], ...]
Column = tuple[str, ...]  # the heading, and a cell for each row


def properties_of(case: Case) -> dict[str, str]:
    """Return the properties of a case, with the batch size that all numbers of devices share."""
    return case.properties | case.constant_batch


def _distinguishing(entries: Sequence[Entry]) -> list[str]:
    """Return the properties that vary, and the devices and the batch sizes, if the entries have any."""
    names = dict.fromkeys(name for entry in entries for name in entry.properties)
    values = {name: {entry.properties.get(name, "") for entry in entries} for name in names}
    always = ("GPUs", "ranks", *BATCHES)
    return [name for name in names if len(values[name]) > 1 or (name in always and values[name] != {""})]


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


def _columns(row: Sequence[Entry | None], group: tuple[str, ...], numbers: Numbers) -> list[Column]:
    """Return the columns of a group that have a figure; the first one has the marks of the warnings."""
    columns: list[Column] = []
    words = ", ".join(value for value in group if value != NOTHING)
    for heading in dict.fromkeys(heading for entry in row if entry for heading in entry.figures):
        texts = [entry.figures.get(heading, "") if entry else "" for entry in row]
        if not any(texts):
            continue
        if not columns:
            pairs = zip(texts, row, strict=True)
            texts = [_marked(text, entry.case, numbers) if entry else "" for text, entry in pairs]
            heading = f"{words}: {heading}" if words else heading
        columns.append((heading, *(text or NOTHING for text in texts)))
    return columns


def _marked(text: str, case: Case, numbers: Numbers) -> str:
    marks = [numbers.setdefault(warning, len(numbers) + 1) for warning in case.warnings]
    return f"{text} !{','.join(map(str, sorted(marks)))}" if marks and text else text


def _fitting(labels: Sequence[Column], groups: Iterable[list[Column]], width: int) -> list[list[Column]]:
    """Return the columns of each table: as many groups as fit on a line beside the labels of the rows."""
    tables: list[list[Column]] = []
    for group in groups:
        if tables and _width([*labels, *tables[-1], *group]) < width:
            tables[-1] += group
        else:
            tables.append(list(group))
    return tables


def _width(columns: Sequence[Column]) -> int:
    return max(len(markdown_table(row)[0]) for row in zip(*columns, strict=True))


def _caption(setup: Setup, case: Case) -> str:
    """Return what all cases of a grid have in common, their images, and the machine."""
    options, environment = case.header["options"], case.header["environment"]
    words = [in_words(name, value) for name, value in setup if name != "kind"]
    kinds = [f"{value} scaling" for name, value in setup if name == "kind"]
    data = options.get("data", {"name": "synthetic"})["name"]
    is_training = isinstance(case.measured.spec, TrainingSpec) and "epoch_images" in options
    images = f"{options['epoch_images']:,} {data} images an epoch" if is_training else ""
    gpus = Counter(gpu["name"] for gpu in environment.get("gpus", ()))
    machine = [f"{count} {name}" for name, count in gpus.items()]
    machine = machine or [f"{environment['cpu']}, {environment['cores']} cores"]
    machine += [
        rates_in_words(environment.get("links", ())),
        f"torch {environment.get('torch', '')}".rstrip(),
    ]
    return ", ".join(filter(None, [*kinds, *words, images, *machine])) + "."


def markdown_table(headings: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [head, "|---" * len(headings) + "|", *body]
