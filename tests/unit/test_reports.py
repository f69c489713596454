"""The tables and figures of reports in perf/reports.toml: each has a command and a stored run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import parameters
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import read_document
from ddpperf.specs import Spec
from tests.project import REPOSITORY
from tools.default_suite import experiments, options_on
from tools.markdown_tables import has_attributes
from tools.report_terms import TIME, Figure, read_figures

FIGURES = read_figures()
WITH_IMAGES = "--data imagefolder:DIR"

over_figures = pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.figure)


@functools.cache
def collected(test: str, options: str, gpus: int) -> list[tuple[Spec | None, str]]:
    """Return the spec of each case that a command collects for a test, and why it is skipped."""
    read = options_on(gpus, options.replace(WITH_IMAGES, "").split())
    if WITH_IMAGES in options:
        images = dataclasses.replace(read.data, name="imagefolder", digest="0123456789ab")
        read = dataclasses.replace(read, data=images)
    markers = {name: marker for _, name, marker in experiments()}
    found = []
    for case in parameters(test, markers[test], read, Machine(device=read.device)):
        (spec,) = case.values
        assert spec is None or isinstance(spec, Spec)
        marks = {mark.name: mark for mark in case.marks}
        found.append((spec, marks["skip"].kwargs["reason"] if "skip" in marks else ""))
    return found


@functools.cache
def stored(run: str, test: str) -> list[tuple[Spec, frozenset[str]]]:
    """Return the spec and the metrics of each case of a test in a stored run."""
    fields = [
        benchmark["extra_info"]["ddpperf"]
        for benchmark in read_document(REPOSITORY / run)["benchmarks"]
        if benchmark["name"].partition("[")[0] == test
    ]
    return [(Measured.from_json(found).spec, frozenset(found["metrics"])) for found in fields]


def missing(figure: Figure, specs: list[Spec]) -> list[dict[str, Any]]:
    """Return the rows of a figure that none of these specs answers."""
    return [row for row in figure.row_values() if not any(has_attributes(spec, row) for spec in specs)]


@over_figures
def test_command_names_a_test_of_its_file(figure: Figure) -> None:
    assert (figure.test.partition(".py")[0], figure.function) in {
        (module, test) for module, test, _ in experiments()
    }


@over_figures
def test_four_gpus_collect_every_row(figure: Figure) -> None:
    cases = collected(figure.function, figure.options, 4)
    assert missing(figure, [spec for spec, skipped in cases if spec is not None and not skipped]) == []


@over_figures
def test_two_cores_measure_or_skip_with_reason(figure: Figure) -> None:
    cases = collected(figure.function, figure.options, 0)
    assert cases
    assert all(spec is not None or skipped for spec, skipped in cases)


@over_figures
def test_every_row_is_stored_with_its_metrics(figure: Figure) -> None:
    needed = set(figure.terms.values()) - {TIME}
    cases = [case for run in figure.runs for case in stored(run, figure.function)]
    assert missing(figure, [spec for spec, metrics in cases if needed <= metrics]) == []


def test_each_term_has_one_meaning() -> None:
    terms = [term for figure in FIGURES for term in figure.terms]
    assert [term for term in terms if terms.count(term) > 1] == []


def test_every_question_of_reports_is_answered() -> None:
    assert {figure.figure[:2] for figure in FIGURES} >= {f"Q{number}" for number in range(1, 8)}
