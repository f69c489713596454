"""Conversion of a stored run to a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.report.ab_table import every_metric, two_sides

PAGE_BEGINS = "## ddpperf: "


def markdown(document: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return a Markdown page with the verdict and its reasons, and foldable tables below."""
    header = document["ddpperf"]
    ab = two_sides(header)
    folded = {"all tests": lines} | ({"all metrics": every_metric(ab)} if ab is not None else {})
    page = [f"{PAGE_BEGINS}{header['verdict']['status']}", "", *_fenced(header["verdict"]["reasons"]), ""]
    for title, hidden in folded.items():
        page += [f"<details><summary>{title}</summary>", "", *_fenced(hidden), "", "</details>", ""]
    return "\n".join(page)


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return lines of text as a Markdown code block.

    The fence has more backticks than any line.
    """
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence]
