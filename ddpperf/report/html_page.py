"""A stored run as one HTML page, which needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ddpperf.io.terminal_text import printable
from ddpperf.report.plots import pictures_of
from ddpperf.report.plots.over_time import History
from ddpperf.report.plots.picture import Picture
from ddpperf.report.stored_cases import all_metrics
from ddpperf.report.summary import highlights, next_step, summary_facts, title
from ddpperf.report.tables import tables_of

PAGE_BEGINS = b"<!doctype html>\n<!-- made by ddpperf -->\n"


def page(document: Mapping[str, Any], history: History = ()) -> str:
    """Return the HTML page of a stored run.

    history: the name and the step seconds by test of each kept run, oldest first.
    """
    header = document["ddpperf"]
    pictures = pictures_of(document, history)
    sections = [
        {
            "table": table,
            "columns": [*table.properties, *table.figures],
            "pictures": [_embedded(picture) for picture in pictures if picture.experiment == table.title],
        }
        for table in tables_of(document)
    ]
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ddpperf.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html: str = environment.get_template("page.html").render(
        title=title(document),
        verdict=header["verdict"],
        next_step=next_step(header),
        sentences=highlights(document),
        sections=sections,
        pictures={picture.name: _embedded(picture) for picture in pictures if not picture.experiment},
        facts=[(label, sentences) for label, sentences in summary_facts(document) if sentences],
        metrics=all_metrics(document),
        environment=sorted((name, str(value)) for name, value in header["environment"].items()),
        command_line=header["options"].get("command_line", ""),
    )
    return printable(html)


def _embedded(picture: Picture) -> dict[str, str]:
    image = base64.b64encode(picture.rendered("svg")).decode()
    return {"source": f"data:image/svg+xml;base64,{image}", "description": picture.description}
