"""Reads the questions of questions.toml, and returns the rows that a case adds to their grids."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.report.questions import figures, sentences
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.results.metrics import find
from ddpperf.specs import RunSpec, TrainingSpec

DEVICES = "devices"  # the axis of GPUs or ranks
BATCHES = ("batch", "global batch")
FILE = Path(__file__).parent / "questions.toml"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report; questions.toml explains the fields. columns: names by their headings."""

    title: str
    tests: tuple[str, ...]
    command: str
    needs: str
    chosen: Callable[[Case], bool]
    rows: tuple[str, ...]
    groups: tuple[str, ...]
    columns: Mapping[str, str]
    per_epoch: bool = False
    rows_of: Callable[[Case], figures.Rows] | None = None
    sentence: Callable[[Sequence[Case]], str] = lambda cases: ""

    def answered_by(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases that have the figures of this question."""
        found = [case for case in of_functions(cases, *self.tests) if self.chosen(case)]
        return [case for case in found if any(entry.figures for entry in self.entries(case))]

    def entries(self, case: Case) -> Iterator[Entry]:
        """Yield the rows of a case; none, if the case does not have what the question needs."""
        if self.needs not in case.metrics:
            return
        if self.rows_of is not None:
            for place, texts in self.rows_of(case):
                yield Entry(case=case, properties=properties_of(case) | place, figures=texts)
        else:
            texts = {
                heading: figures.text_of(case, name, per_epoch=self.per_epoch)
                for heading, name in self.columns.items()
            }
            yield Entry(case=case, properties=properties_of(case), figures=texts)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a grid shows of a case: its place by its properties, and its figures by their headings."""

    case: Case
    properties: Mapping[str, str]
    figures: Mapping[str, str]


def properties_of(case: Case) -> dict[str, str]:
    """Return the properties of a case, with the batch size that all numbers of devices share.

    The name of a recipe says its warm-up and accumulation.
    """
    found = case.properties | case.constant_batch
    if isinstance(case.measured.spec, RunSpec):
        batch_size = case.measured.spec.global_batch_size
        found["training"] = figures.without_batch(found["recipe"], batch_size)
        found |= dict.fromkeys(("recipe", "warm-up", "seeds", "seed", "batch"), "")
        found["global batch"] = f"{batch_size:,}"
        found["strategy"] = found["strategy"].partition("+accumulate")[0]
    if isinstance(case.measured.spec, TrainingSpec) and (data := case.header["options"].get("data")):
        found["images"] = f"{case.measured.spec.epoch_images:,} {data['name']} images an epoch"
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
    metrics = (name for name in columns.values() if name not in figures.COMPUTED)
    functions = {
        name: getattr(module, fields[name])
        for name, module in (("chosen", figures), ("rows_of", figures), ("sentence", sentences))
        if name in fields
    }
    usual = {"needs": next(metrics, ""), "chosen": lambda case: True, "rows": (DEVICES,), "groups": BATCHES}
    return Question(title=title, **{**usual, **fields, **functions, "columns": columns})
