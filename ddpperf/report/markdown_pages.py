"""A test run as a Markdown page: for a pull request, a job's summary, or a page of results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.io.terminal_text import harmless
from ddpperf.report.comparison import Measurement, certain_first, measurements_of
from ddpperf.report.stored_cases import all_metrics, cases_of
from ddpperf.report.summary import TITLE_BEGINS, next_step, sentences, summary_lines, verdict_lines
from ddpperf.results import units
from ddpperf.results.command_words import command_words
from ddpperf.results.outcomes import Status

VERDICT_BEGINS = "## ddpperf: "
RESULTS_BEGIN = "# Results on "


def markdown(document: Mapping[str, Any]) -> str:
    """Return a Markdown page: the verdict and what changed, as on the terminal, and foldable tables."""
    header = document["ddpperf"]
    metrics = [f"{test}: {texts}" for test, texts in all_metrics(document) if texts]
    folded = {"all tests": summary_lines(document), "all metrics": metrics}
    reasons = [*sentences(header), f"next: {next_step(header)}"]
    page = [f"{VERDICT_BEGINS}{header['verdict']['status']}", "", *_fenced(reasons), ""]
    if "judged" in header:
        changes = summary_lines(document, verbose=False)
        begin = next(place for place, line in enumerate(changes) if line.startswith(TITLE_BEGINS))
        page += [*_fenced(changes[begin:]), ""]
    for title, hidden in folded.items():
        if hidden:
            page += [f"<details><summary>{title}</summary>", "", *_fenced(hidden), "", "</details>", ""]
    return harmless("\n".join(page))


def github_annotations(document: Mapping[str, Any]) -> list[str]:
    """Return GitHub's workflow commands that mark the file of each experiment with worse measurements.

    The format is that of https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
    """
    header = document["ddpperf"]
    if header["verdict"]["status"] != Status.FAIL:
        return []
    by_file: dict[str, list[Measurement]] = {}
    for one in certain_first(measurements_of(header, cases_of(document))):
        if one.is_("worse"):
            by_file.setdefault(one.row["tests"][0].partition("::")[0], []).append(one)
    found = []
    for file, worse in by_file.items():
        title = f"ddpperf FAIL: {units.counted(len({one.tests for one in worse}), 'measurement')} worse"
        text = "; ".join(f"{one.name()} by {one.changes()}" for one in worse)
        escaped = [
            re.sub("[%\r\n:,]", lambda sign: f"%{ord(sign[0]):02X}", part) for part in (file, title, text)
        ]
        found.append("::error file={},title={}::{}".format(*escaped))
    return found


def results_page(document: Mapping[str, Any]) -> str:
    """Return a Markdown page with the results of a stored run, as its summary shows them."""
    header = document["ddpperf"]
    lines = [*summary_lines(document), *verdict_lines(header)]
    page = [
        f"{RESULTS_BEGIN}{header['hardware_key']}",
        "",
        f"Measured on {document['datetime'][:10]} by this command:",
        "",
        f"    python -m pytest {command_words(header, tests=True)}",
        "",
        *_fenced(lines),
    ]
    return harmless("\n".join(page)) + "\n"


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return a Markdown code block, whose fence has more backticks than any line."""
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence]
