"""Reads stored runs, from which tools/ makes tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpperf.report.questions.grid import markdown_table
from ddpperf.report.stored_cases import Case, cases_of, of_functions
from ddpperf.results.stored_runs import read_document
from ddpperf.specs import Spec

ROOT = Path(__file__).parents[1]


def cases(run: str) -> list[Case]:
    """Return the measured tests of a stored run."""
    return cases_of(read_document(ROOT / run))


def one(found: Sequence[Case], test: str, **attributes: Any) -> Case:
    """Return the only case of a test function whose spec has these attributes."""
    (case,) = (case for case in of_functions(found, test) if has_attributes(case.measured.spec, attributes))
    return case


def has_attributes(spec: Spec, attributes: Mapping[str, Any]) -> bool:
    """Return whether a spec has all of these attributes."""
    return all(getattr(spec, name, None) == value for name, value in attributes.items())


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([*markdown_table(headings, *rows), ""])
