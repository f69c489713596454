"""Reads perf/reports.toml: the tables and figures of reports, with their commands and stored runs."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from ddpperf.results import metrics
from ddpperf.results.units import counted
from ddpperf.specs import Spec, format_bytes
from tools.tables import ROOT, has_attributes, markdown

COLUMNS = 100  # of a line
TIME = "time"  # the time of a test itself, which every stored test has
RECIPE = "recipe"  # the name of a training recipe, by which a row may be selected
# What the columns of reports call the attributes of a spec
WORDS = {
    "world_size": "GPUs",
    "per_rank_batch_size": "batch per GPU",
    "global_batch_size": "global batch",
    "loader_workers": "loader workers",
    "nbytes": "buffer",
    "drop_last": "drop_last",
    "buffer_sync": "buffers synchronized",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A table or figure of reports; perf/reports.toml explains the fields."""

    question: str
    figure: str
    file: str
    test: str
    options: str = ""
    rows: Mapping[str, Sequence[Any]]
    terms: Mapping[str, str]
    runs: Sequence[str] = field(default=())
    not_stored: str = ""

    @property
    def command(self) -> str:
        """Return the command that measures all rows."""
        return f"python -m pytest perf/{self.file}::{self.test} {self.options}".rstrip()

    def row_values(self) -> Iterator[dict[str, Any]]:
        """Yield the attributes that the spec of each row has, by name."""
        for values in itertools.product(*self.rows.values()):
            yield dict(zip(self.rows, values, strict=True))

    def described_rows(self) -> str:
        """Return the number of rows and what distinguishes the rows, as text."""
        varying = {name: values for name, values in self.rows.items() if len(values) > 1}
        count = sum(1 for _ in self.row_values())
        parts = [f"{WORDS.get(name, name)} {listed(name, values)}" for name, values in varying.items()]
        if RECIPE in varying:  # names of recipes contain commas
            parts = ["; ".join(varying[RECIPE])]
        rows = counted(count, "row")
        return f"{rows}: {'; '.join(parts)}" if parts else rows


def listed(name: str, values: Sequence[Any]) -> str:
    texts = {True: "yes", False: "no"}
    return ", ".join(
        format_bytes(value) if name == "nbytes" else texts[value] if isinstance(value, bool) else str(value)
        for value in values
    )


def is_row(spec: Spec, row: Mapping[str, Any], recipe: str = "") -> bool:
    """Return whether a spec has all attributes of a row.

    recipe: the name of the training recipe, which a row may name besides attributes of the spec.
    """
    attributes = {name: value for name, value in row.items() if name != RECIPE}
    return row.get(RECIPE, recipe) == recipe and has_attributes(spec, attributes)


def read_figures(path: str = "perf/reports.toml") -> list[Figure]:
    """Return the tables and figures of reports; raise TypeError for a missing or unknown key."""
    return [Figure(**fields) for fields in tomllib.loads((ROOT / path).read_text())["figure"]]


def figures_list(path: str) -> str:
    """Return a Markdown list of the rows, the stored runs and the command of each figure."""
    lines = []
    for figure in read_figures(path):
        runs = ", ".join(link(run) for run in figure.runs)
        stored = f"Stored in {runs}." if runs else f"Not stored yet, {figure.not_stored}."
        name = f"**{figure.question}** {figure.figure}".removeprefix("**** ")
        lines += wrap(
            f"- {name}. {figure.described_rows()}. {stored}",
            COLUMNS,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(f"  `{figure.command}`")
    return "\n".join(lines)


def link(run: str) -> str:
    """Return a link from a page in docs/ to a stored run."""
    path = Path(run)
    return f"[{path.parent.name}/{path.stem}]({os.path.relpath(run, 'docs')})"


def terms_table(path: str) -> str:
    """Return a Markdown table of what reports call a figure, and of the metric that it is here."""
    rows = []
    for figure in read_figures(path):
        for term, metric in figure.terms.items():
            name = f"`{metric}`" if metric != TIME else "the time of the test"
            heading = metrics.find(metric).heading if metric != TIME else "step, epoch or training"
            rows.append((term, name, heading, f"`{figure.command}`"))
    return markdown(("in a report", "metric here", "printed as", "command"), rows)
