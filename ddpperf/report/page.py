"""A stored run as one HTML page, which needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ddpperf.io.terminal_text import printable
from ddpperf.report.highlights import highlights
from ddpperf.report.plots import pictures_of
from ddpperf.report.plots.over_time import History
from ddpperf.report.plots.picture import Picture
from ddpperf.report.questions.communication import FORMULAS
from ddpperf.report.questions.question import answering, table_rows
from ddpperf.report.stored_cases import Case, cases_of, rows_of
from ddpperf.report.summary import next_step, summary_facts, title
from ddpperf.report.tables import compared_texts, tables_of
from ddpperf.report.text import metric_texts, without_file
from ddpperf.results import units
from ddpperf.results.stored_runs import write_atomically

PAGE_BEGINS = b"<!doctype html>\n<!-- made by ddpperf -->\n"
MOST_IMPORTANT = 3  # rows on top of the page


def write_page(path: Path, document: Mapping[str, Any], history: History = ()) -> Path:
    """Write the HTML page of a stored run; raise OSError if the file cannot be written."""
    return write_atomically(path, printable(page(document, history)))


def page(document: Mapping[str, Any], history: History = ()) -> str:
    """Return the HTML page of a stored run.

    history: the name and the step seconds by test of each kept run, oldest first.
    """
    header = document["ddpperf"]
    pictures = pictures_of(document, history)
    answers = answering(cases_of(document), FORMULAS)
    sections = [
        {
            "table": table,
            "columns": [*table.properties, *table.figures],
            "pictures": [_embedded(picture) for picture in pictures if picture.experiment == table.title],
        }
        for table in tables_of(document)
    ]
    html: str = _template().render(
        title=title(document),
        verdict=header["verdict"],
        next_step=next_step(header),
        important=_important(rows_of(document)),
        sentences=highlights(document),
        sections=sections,
        formulas=table_rows(answers, FORMULAS) if answers else [],
        about_formulas=FORMULAS.sentence(answers) if answers else "",
        pictures={picture.name: _embedded(picture) for picture in pictures if not picture.experiment},
        facts=[(label, sentences) for label, sentences in summary_facts(document) if sentences],
        metrics=[(without_file(case.test), metric_texts(case.metrics)) for case in cases_of(document)],
        environment=sorted((name, str(value)) for name, value in header["environment"].items()),
        command_line=header["options"].get("command_line", ""),
    )
    return html


def _important(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Return the tests that changed most, or else those that scaled worst, with their findings."""
    ratios = {case.test: case for case in cases if _ratio(case)}
    if ratios:
        most = sorted(ratios.values(), key=lambda case: -max(_ratio(case), 1 / _ratio(case)))
        return [(without_file(case.test), *compared_texts(case)) for case in most[:MOST_IMPORTANT]]
    scaled = [case for case in cases if "efficiency" in case.metrics]
    scaled.sort(key=lambda case: case.value("efficiency") or 0.0)
    return [
        (without_file(case.test), units.seconds(case.seconds), f"efficiency {units.percent(value)}")
        for case in scaled[:MOST_IMPORTANT]
        if (value := case.value("efficiency")) is not None
    ]


def _ratio(case: Case) -> float:
    """Return a judged test's time ratio in the comparison, or 0 if the test was not compared."""
    if case.ab is not None:
        return float(case.ab["ratio"]) if case.ab["primary"] and case.ab["gated"] else 0.0
    return case.change.ratio if case.change is not None and case.change.judged else 0.0


def _embedded(picture: Picture) -> dict[str, str]:
    image = base64.b64encode(picture.rendered("svg")).decode()
    return {"source": f"data:image/svg+xml;base64,{image}", "description": picture.description}


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ddpperf.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")
