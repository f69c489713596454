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
from tools.report_figures import RECIPE, TIME, Figure, is_row, read_figures

# The figures without a stored run, which all need GPUs. This list may only become shorter: a figure
# that is stored must be removed from it.
NOT_STORED = {
    "communication of a DataParallel step by its parts, 4 GPUs",
    "parts of a step, 4 GPUs",
    "scaling of ResNet-50",
    "time of DataParallel over the time of DDP",
}
MOST_NOT_STORED = 4
FIGURES = read_figures()
WITH_IMAGES = "--data imagefolder:DIR"

over_figures = pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.figure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A collected or stored test: its spec, its recipe, its metrics, and why it was skipped."""

    spec: Spec | None
    recipe: str
    metrics: frozenset[str] = frozenset()
    skipped: str = ""

    def answers(self, row: dict[str, Any]) -> bool:
        return self.spec is not None and not self.skipped and is_row(self.spec, row, self.recipe)


@functools.cache
def collected(test: str, options: str, gpus: int) -> list[Found]:
    """Return the cases that a command collects for a test."""
    read = options_on(gpus, options.replace(WITH_IMAGES, "").split())
    if WITH_IMAGES in options:
        images = dataclasses.replace(read.data, name="imagefolder", digest="0123456789ab")
        read = dataclasses.replace(read, images=images)
    markers = {name: marker for _, name, marker in experiments()}
    found = []
    for case in parameters(test, markers[test], read, Machine(device=read.device)):
        (spec,) = case.values
        assert spec is None or isinstance(spec, Spec)
        marks = {mark.name: mark for mark in case.marks}
        recipe = str(marks[RECIPE].args[0]) if RECIPE in marks else ""
        reason = marks["skip"].kwargs["reason"] if "skip" in marks else ""
        found.append(Found(spec=spec, recipe=recipe, skipped=reason))
    return found


@functools.cache
def stored(run: str, test: str) -> list[Found]:
    """Return the cases of a test that a stored run has."""
    document = json.loads((REPOSITORY / run).read_text())
    found = []
    for benchmark in document["benchmarks"]:
        if benchmark["name"].partition("[")[0] == test:
            fields = benchmark["extra_info"]["ddpperf"]
            recipe = document["ddpperf"].get("recipes", {}).get(benchmark["fullname"], "")
            spec = Measured.from_json(fields).spec
            found.append(Found(spec=spec, recipe=recipe, metrics=frozenset(fields["metrics"])))
    return found


@over_figures
def test_command_names_a_test_of_its_file(figure: Figure) -> None:
    assert (figure.file.removesuffix(".py"), figure.test) in {
        (module, test) for module, test, _ in experiments()
    }


@over_figures
def test_four_gpus_collect_every_row(figure: Figure) -> None:
    cases = collected(figure.test, figure.options, 4)
    rows = list(figure.row_values())
    assert rows
    assert [row for row in rows if not any(case.answers(row) for case in cases)] == []


@over_figures
def test_two_cores_measure_or_skip_with_reason(figure: Figure) -> None:
    cases = collected(figure.test, figure.options, 0)
    assert cases
    assert all(case.spec is not None or case.skipped for case in cases)


@over_figures
def test_every_row_is_stored_with_its_metrics(figure: Figure) -> None:
    if figure.figure in NOT_STORED:
        assert (list(figure.runs), bool(figure.not_stored)) == ([], True)
        return
    assert not figure.not_stored
    needed = set(figure.terms.values()) - {TIME}
    cases = [case for run in figure.runs for case in stored(run, figure.test) if needed <= case.metrics]
    assert [row for row in figure.row_values() if not any(case.answers(row) for case in cases)] == []


def test_figures_without_stored_run_become_fewer() -> None:
    assert {figure.figure for figure in FIGURES if figure.not_stored} == NOT_STORED
    assert len(NOT_STORED) <= MOST_NOT_STORED


def test_each_term_has_one_meaning() -> None:
    terms = [term for figure in FIGURES for term in figure.terms]
    assert [term for term in terms if terms.count(term) > 1] == []


def test_every_question_of_reports_is_answered() -> None:
    assert {figure.question for figure in FIGURES} == {"", "Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7"}
