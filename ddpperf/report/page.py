"""A stored run as Markdown: a page, or a part of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.report.ab_table import every_metric, two_sides

PAGE_BEGINS = "## ddpperf: "


def markdown(document: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return the verdict with its reasons; the summary and an A/B run's metrics are folded away."""
    header = document["ddpperf"]
    ab = two_sides(header)
    folded = {"all tests": lines} | ({"all metrics": every_metric(ab)} if ab is not None else {})
    page = [f"{PAGE_BEGINS}{header['verdict']['status']}", "", *_fenced(header["verdict"]["reasons"]), ""]
    for title, hidden in folded.items():
        page += [f"<details><summary>{title}</summary>", "", *_fenced(hidden), "", "</details>", ""]
    return "\n".join(page)


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return the lines as a code block, in a fence with more backticks than any line has."""
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence]
