"""Reads perf/reports.toml: the tables and figures of reports, with their commands and stored runs."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from tools.markdown_tables import ROOT

TIME = "time"  # the time of a test itself, which every stored test has


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A table or figure of reports; perf/reports.toml explains the fields."""

    figure: str
    test: str
    options: str = ""
    rows: Mapping[str, Sequence[Any]]
    terms: Mapping[str, str]
    runs: Sequence[str]

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.partition("::")[2]

    def row_values(self) -> Iterator[dict[str, Any]]:
        """Yield the attributes that the spec of each row has, by name."""
        for values in itertools.product(*self.rows.values()):
            yield dict(zip(self.rows, values, strict=True))


def read_figures(path: str = "perf/reports.toml") -> list[Figure]:
    """Return the tables and figures of reports; raise TypeError for a missing or unknown key."""
    return [Figure(**fields) for fields in tomllib.loads((ROOT / path).read_text())["figure"]]


def terms_list(path: str) -> str:
    """Return a Markdown list that gives, for each test, the terms of reports and ddpperf's metrics."""
    terms: dict[str, list[str]] = {}
    for figure in read_figures(path):
        for term, metric in figure.terms.items():
            name = f"`{metric}`" if metric != TIME else "the time of the test"
            terms.setdefault(figure.function, []).append(f"{term} ({name})")
    items = (f"- `{test}`: {', '.join(found)}." for test, found in terms.items())
    return "\n".join(fill(item, 100, subsequent_indent="  ", break_on_hyphens=False) for item in items) + "\n"
