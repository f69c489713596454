"""The tables and figures of reports in perf/reports.toml: each has a command and a stored run."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import parameters
from ddpperf.results.samples import Measured
from ddpperf.specs import Spec
from tests.project import REPOSITORY
from tools.default_suite import experiments, options_on
from tools.report_figures import TIME, Figure, is_row, read_figures

# The figures without a stored run, which all need several GPUs. This list may only become shorter:
# a figure that is stored must be removed from it.
NOT_STORED = {
    "bandwidth utilization while training",
    "computation and communication of a DDP step, 2 GPUs and batch 32",
    "computation and communication of a DDP step, 4 GPUs",
    "parts of a step, 4 GPUs",
    "prediction for more GPUs from buckets and links",
    "time of DataParallel over the time of DDP",
}
MOST_NOT_STORED = 6
FIGURES = read_figures()
WITH_IMAGES = "--data imagefolder:DIR"

over_figures = pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.figure)


@functools.cache
def collected(test: str, options: str, gpus: int) -> list[tuple[Spec | None, str]]:
    """Return the spec and the reason to skip of each case that a command collects for a test."""
    arguments = options.replace(WITH_IMAGES, "").split()
    read = options_on(gpus, arguments)
    if WITH_IMAGES in options:
        read = dataclasses.replace(
            read, images=dataclasses.replace(read.data, name="imagefolder", digest="0123456789ab")
        )
    marks = {name: mark for _, name, mark in experiments()}
    found = []
    for case in parameters(test, marks[test], read, Machine(device=read.device)):
        (spec,) = case.values
        assert spec is None or isinstance(spec, Spec)
        reasons = [mark.kwargs["reason"] for mark in case.marks if mark.name == "skip"]
        found.append((spec, reasons[0] if reasons else ""))
    return found


@functools.cache
def stored(run: str) -> list[tuple[str, Spec, dict[str, Any]]]:
    """Return the test function, the spec and the metrics of each test of a stored run."""
    found = []
    for benchmark in json.loads((REPOSITORY / run).read_text())["benchmarks"]:
        fields = benchmark["extra_info"]["ddpperf"]
        test = benchmark["name"].partition("[")[0]
        found.append((test, Measured.from_json(fields).spec, fields["metrics"]))
    return found


@over_figures
def test_command_names_a_test_of_its_file(figure: Figure) -> None:
    assert (figure.file.removesuffix(".py"), figure.test) in {
        (module, test) for module, test, _ in experiments()
    }


@over_figures
def test_four_gpus_collect_every_row(figure: Figure) -> None:
    specs = [spec for spec, skipped in collected(figure.test, figure.options, 4) if spec and not skipped]
    rows = list(figure.row_values())
    assert rows
    assert [row for row in rows if not any(is_row(spec, row) for spec in specs)] == []


@over_figures
def test_two_cores_measure_or_skip_with_reason(figure: Figure) -> None:
    cases = collected(figure.test, figure.options, 0)
    assert cases
    assert all(spec is not None or skipped for spec, skipped in cases)


@over_figures
def test_every_row_is_stored_with_its_metrics(figure: Figure) -> None:
    if figure.figure in NOT_STORED:
        assert (list(figure.runs), bool(figure.not_stored)) == ([], True)
        return
    assert not figure.not_stored
    needed = set(figure.terms.values()) - {TIME}
    cases = [
        (spec, metrics)
        for run in figure.runs
        for test, spec, metrics in stored(run)
        if test == figure.test and needed <= metrics.keys()
    ]
    rows = list(figure.row_values())
    assert [row for row in rows if not any(is_row(spec, row) for spec, _ in cases)] == []


def test_figures_without_stored_run_become_fewer() -> None:
    assert {figure.figure for figure in FIGURES if figure.not_stored} == NOT_STORED
    assert len(NOT_STORED) <= MOST_NOT_STORED


def test_each_term_has_one_meaning() -> None:
    terms = [term for figure in FIGURES for term in figure.terms]
    assert [term for term in terms if terms.count(term) > 1] == []


def test_every_question_of_reports_is_answered() -> None:
    assert {figure.question for figure in FIGURES} == {"", "Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7"}
