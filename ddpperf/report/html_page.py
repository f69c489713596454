"""A stored run as one HTML page, which needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpperf.history.lines import history_lines
from ddpperf.io.terminal_text import printable
from ddpperf.report.comparison import comparison_lines
from ddpperf.report.plots import pictures_of
from ddpperf.report.plots.picture import Picture
from ddpperf.report.stored_cases import all_metrics
from ddpperf.report.summary import WIDTH, highlights, next_step, sentences, summary_facts, title
from ddpperf.report.tables import tables_of
from ddpperf.why.lines import headings, tree

ON_TOP = ("ab", "scaling")  # pictures
MOST_ROWS = 12  # of a table that is not folded
PAGE_BEGINS = b"<!doctype html>\n<!-- made by ddpperf -->\n"


def page(document: Mapping[str, Any], root: Path | None = None) -> str:
    """Return the HTML page of a stored run. root: the project whose stored runs are its history."""
    header, facts = document["ddpperf"], dict(summary_facts(document))
    pictures = pictures_of(document)
    on_top = sorted(
        (picture for picture in pictures if picture.name in ON_TOP),
        key=lambda picture: ON_TOP.index(picture.name),
    )
    others = [picture for picture in pictures if picture not in on_top]
    sections = [
        {
            "table": table,
            "columns": [*table.properties, *table.figures],
            "pictures": [_embedded(picture) for picture in others if picture.experiment == table.title],
            "folded": len(table.tests) > MOST_ROWS,
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
        status=header["verdict"]["status"],
        reasons=sentences(header),
        next_step=next_step(header),
        highlights=[*highlights(document), *(f"Thresholds: {line}." for line in facts["thresholds"])],
        changes=comparison_lines(document, WIDTH) if "judged" in header else [],
        compared=comparison_lines(document, WIDTH, verbose=True) if "judged" in header else [],
        traced=[
            {"why": why, "heading": headings(why), "rows": tree(why)}
            for why in header.get("judged", {}).get("why", ())
            if not why.get("problem")
        ],
        on_top=list(map(_embedded, on_top)),
        sections=sections,
        pictures={picture.name: _embedded(picture) for picture in others if not picture.experiment},
        facts=[(label, lines) for label, lines in facts.items() if lines],
        history=history_lines(root, header["hardware_key"]) if root is not None else [],
        metrics=all_metrics(document),
        environment=sorted((name, str(value)) for name, value in header["environment"].items()),
        command_line=header["options"].get("command_line", ""),
    )
    return printable(html)


def _embedded(picture: Picture) -> dict[str, str]:
    image = base64.b64encode(picture.rendered("svg")).decode()
    return {"source": f"data:image/svg+xml;base64,{image}", "description": picture.description}
