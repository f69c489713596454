"""Makes the generated tables, pages and pictures of README.md and docs/ from stored runs.

    python -m tools.update_docs

A generated table stands between the lines "<!-- made by tools/update_docs.py from the KIND in RUN -->"
and "<!-- end -->". KIND is a name in `TABLES`, or titles of experiments as the summary of a run prints
them. `PAGES` are made as a whole. tests/unit/test_docs.py checks that everything is current.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ddpperf.report.markdown_pages import results_page
from ddpperf.report.plots import write_plots
from ddpperf.report.summary import WIDTH, title, verdict_lines
from ddpperf.report.tables import tables_of
from ddpperf.report.terminal_tables import table_lines, wrapped
from ddpperf.results.stored_runs import read_document
from tools.markdown_tables import ROOT, markdown
from tools.report_mistakes import (
    busy_table,
    clocks_table,
    communications_table,
    data_parallel_table,
    laws_table,
    mistakes_table,
    precisions_table,
    speedups_table,
)

MADE = re.compile(
    r"(<!-- made by tools/update_docs.py from the (.+?) in (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)
RESULTS = ROOT / "docs" / "results"
# Each page of results, and the stored run that it shows
PAGES = {
    "cpu2-epyc-25-17-1": "perf/baselines/cpu2-epyc-25-17-1/0014_core.json",
    "h100-80gb-hbm3x2": "perf/baselines/h100-80gb-hbm3x2/0005_core.json",
    "h100-80gb-hbm3x4": "perf/baselines/h100-80gb-hbm3x4/0005_core.json",
    "h200x1": "perf/baselines/h200x1/0003_core.json",
}
PICTURED = "docs/runs/h100x4-picture.json.gz"  # a run of the part "picture" of tools/several_gpus.py
PICTURE = ROOT / "docs" / "scaling.png"


def baselines_table(folder: str) -> str:
    """Return a Markdown table of the stored runs in a folder."""
    rows = []
    for path in sorted((ROOT / folder).glob("*/*.json")):
        document = read_document(path)
        commit = document["ddpperf"]["environment"]["commit"]  # with + if the code was not committed
        name = str(path.relative_to(ROOT / folder))
        rows.append((name, document["datetime"][:10], commit, str(len(document["benchmarks"]))))
    return markdown(("run", "day", "commit", "tests"), rows)


def experiments_block(run: str, titles: str) -> str:
    """Return the tables of some experiments and the verdict of a stored run, as its summary prints them.

    titles: the titles of the experiments, joined by commas.
    """
    document = read_document(ROOT / run)
    lines = wrapped(title(document), WIDTH)
    by_title = {table.title.upper(): table for table in tables_of(document)}
    for name in titles.split(", "):
        lines += ["", *table_lines(by_title[name], WIDTH, notes=False)]
    lines += ["", *verdict_lines(document["ddpperf"])]
    return "\n".join(["```text", *lines, "```", ""])


# The function that makes a table, by its name in a page; each takes the path of a stored run
TABLES: dict[str, Callable[[str], str]] = {
    "baselines": baselines_table,  # a folder
    "speedups": speedups_table,
    "laws": laws_table,
    "busy GPUs": busy_table,
    "communication": communications_table,
    "DataParallel steps": data_parallel_table,
    "precisions": precisions_table,
    "changed trainings": mistakes_table,
    "clocks": clocks_table,  # a result of tools/plain_timing.py
}


def updated(page: str) -> str:
    """Return the text of a Markdown page with all generated tables made again."""

    def made(found: re.Match[str]) -> str:
        begin, kind, source, end = found.groups()
        table = TABLES[kind](source) if kind in TABLES else experiments_block(source, kind)
        return f"{begin}{table}{end}"

    return MADE.sub(made, page)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with generated parts, and its current text."""
    readmes = (ROOT / "README.md", ROOT / "perf" / "baselines" / "README.md")
    for path in (*readmes, *(ROOT / "docs").glob("*.md")):
        yield path, updated(path.read_text())
    for name, run in PAGES.items():
        yield RESULTS / f"{name}.md", results_page(read_document(ROOT / run))


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    for path, text in pages():
        path.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        write_plots(Path(folder), read_document(ROOT / PICTURED), [])
        shutil.copy(Path(folder) / "scaling.png", PICTURE)


if __name__ == "__main__":
    main()
