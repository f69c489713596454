"""Reads the questions of questions.toml, and returns the rows that a case adds to their grids."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused, first_line
from ddpperf.report.questions import figures
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.results.metrics import find
from ddpperf.specs import EpochSpec, RunSpec, TrainingSpec

DEVICES = "devices"  # the axis of GPUs or ranks
BATCHES = ("batch", "global batch")
FUNCTIONS = ("chosen", "rows_of", "sentence")  # fields with the name of a function of figures.py
FILE = Path(__file__).parent / "questions.toml"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report; questions.toml explains the fields."""

    title: str
    tests: tuple[str, ...]
    columns: Mapping[str, str]  # names by their headings
    groups: tuple[str, ...]
    options: str = ""
    rows: tuple[str, ...] = (DEVICES,)
    per_epoch: bool = False
    chosen: Callable[[Case], bool] = lambda case: True
    rows_of: Callable[[Case], figures.Rows] | None = None
    text: str = ""
    sentence: Callable[[Sequence[Case]], str] | None = None

    @property
    def command(self) -> str:
        tests = " ".join(f"perf/{test}" for test in self.tests)
        return f"python -m pytest {tests} {self.options}".rstrip()

    def answered_by(self, cases: Sequence[Case]) -> list[Entry]:
        """Return the rows of all cases that have figures; a test that failed early has no metrics."""
        functions = [test.rpartition("::")[2] for test in self.tests]
        found = [case for case in of_functions(cases, *functions) if case.metrics and self.chosen(case)]
        for case in found:
            for name, metric in case.metrics.items():
                if metric["unit"] not in ("", unit := find(name).unit):
                    stored = f"{name} of {case.test} is stored in {metric['unit']}, not in {unit}"
                    raise Refused(f"{stored}; measure it again")
        return [
            Entry(case=case, properties=properties_of(case) | place, figures=texts)
            for case in found
            for place, texts in (self.rows_of or self._row)(case)
            if any(texts.values())
        ]

    def _row(self, case: Case) -> figures.Rows:
        columns = self.columns.items()
        texts = {heading: figures.text_of(case, name, per_epoch=self.per_epoch) for heading, name in columns}
        yield {}, texts


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a grid shows of a case: its place by its properties, and its figures by their headings."""

    case: Case
    properties: Mapping[str, str]
    figures: Mapping[str, str]

    @property
    def warnings(self) -> list[str]:
        """The warnings of the case, and the reason if its test failed."""
        outcome = self.case.header["outcomes"][self.case.test]
        failed = [f"the test failed: {first_line(outcome['reason'])}"] * (outcome["kind"] == "failed")
        return [*failed, *self.case.warnings]


def properties_of(case: Case) -> dict[str, str]:
    """Return the properties of a case, without warm-up and accumulation, which the name of its recipe has."""
    found = {**case.properties}
    if isinstance(case.measured.spec, RunSpec):
        batch_size = case.measured.spec.global_batch_size
        found["training"] = re.sub(rf"^{batch_size},? ", "", found["recipe"])  # "2048, LARS" is "LARS"
        found |= dict.fromkeys(("recipe", "seeds", "seed", "batch"), "")
        found |= {"warm-up": ""} if case.recipe else {}
        found["global batch"] = f"{batch_size:,}"
        found["strategy"] = found["strategy"].partition("+accumulate")[0]
    if isinstance(case.measured.spec, TrainingSpec) and (data := case.header["options"].get("data")):
        found["images"] = f"{case.measured.spec.epoch_images:,} {data['name']} images an epoch"
    if isinstance(case.measured.spec, EpochSpec):
        found["work"] = "whole epochs"
    return found


def read_questions() -> list[Question]:
    """Return the questions of questions.toml, in their order."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    shared: dict[str, list[str]] = tables.pop("columns")
    return [_question(title, fields, shared) for title, fields in tables.items()]


def _question(title: str, fields: dict[str, Any], shared: Mapping[str, list[str]]) -> Question:
    columns: dict[str, str] = {}
    for written in fields.get("columns", ()):
        for column in shared.get(written, [written]):
            name, _, heading = column.partition(" as ")
            heading = heading or (name if name in figures.COMPUTED else find(name).heading)
            assert heading not in columns, f"two columns of {title!r} are called {heading!r}"
            columns[heading] = name
    functions = {name: getattr(figures, fields[name]) for name in FUNCTIONS if name in fields}
    groups = [name for name in BATCHES if name not in fields.get("rows", ())]
    return Question(title=title, **{"groups": groups, **fields, **functions, "columns": columns})
