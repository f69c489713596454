"""Makes the generated tables, pages and pictures of README.md and docs/ from stored runs and options.

    python -m tools.update_docs

A generated table stands between the lines "<!-- made by tools/update_docs.py from the KIND in RUN -->"
and "<!-- end -->". KIND is a name in `TABLES`, a question of reports, or titles of experiments
as the summary of a run prints them. `PAGES` are made as a whole.
tests/unit/test_docs.py checks that everything is current.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill

from ddpperf.plugin.options.option_table import FIELDS, GROUPS
from ddpperf.report.markdown_pages import results_page
from ddpperf.report.plots import write_plots
from ddpperf.report.questions import report_tables
from ddpperf.report.questions.question import read_questions
from ddpperf.report.summary import WIDTH, summary_lines, title, verdict_lines
from ddpperf.report.tables import tables_of
from ddpperf.report.terminal_tables import table_lines, wrapped
from ddpperf.results.stored_runs import read_document
from tools import calibrate
from tools.markdown_tables import ROOT, markdown
from tools.report_mistakes import clocks_table, speedups_table

MADE = re.compile(
    r"(<!-- made by tools/update_docs.py from the (.+?) in (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)
RESULTS = ROOT / "docs" / "results"
# Each page of results, and the stored run that it shows
PAGES = {
    "cpu2-epyc-25-17-1": "perf/baselines/cpu2-epyc-25-17-1/0014_core.json",
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


def output_block(run: str) -> str:
    """Return what a stored run prints without -v."""
    document = read_document(ROOT / run)
    last = verdict_lines(document["ddpperf"], verbose=False)
    return "\n".join(["```text", *summary_lines(document, verbose=False), *last, "```", ""])


def question_block(run: str, title: str) -> str:
    """Return the tables that answer a question of reports, from a stored run, as --tables prints them."""
    return report_tables(read_document(ROOT / run)).split(f"## {title}\n\n")[1].split("\n## ")[0]


def commands_list(times: str) -> str:
    """Return a list of the commands that answer questions, with the time that each takes.

    times: a JSON file of the seconds of each file of tests, from pytest's --junitxml.
    """
    seconds = json.loads((ROOT / times).read_text())
    titles: dict[str, list[str]] = {}  # by the file of the tests
    options: dict[str, str] = {}
    for question in read_questions():
        file = question.tests[0].partition("::")[0]
        needs = f" (with `{question.options}`)" if question.options.removeprefix("--data cifar10") else ""
        titles.setdefault(file, []).append(f"{question.title}{needs}")
        options[file] = " --data cifar10" if "--data" in question.options else options.get(file, "")
    items = (
        f"- `python -m pytest perf/{file} --tables{options[file]}`"
        f"{f' ({math.ceil(seconds[file])} s)' if file in seconds else ''}: {'; '.join(found)}."
        for file, found in titles.items()
    )
    return "\n".join(fill(item, 100, subsequent_indent="  ", break_on_hyphens=False) for item in items) + "\n"


def options_tables(_: str) -> str:
    """Return a table for each group of command-line options, and one of the fields of --spec."""
    parts = []
    for group, options in GROUPS.items():
        rows = []
        for option in options:
            repeat = " Repeat the option to set several." if option.repeated else ""
            name = f"{option.name} {option.metavar}".strip()
            rows.append((f"`{name}`", option.default_text, option.help + repeat))
        parts.append(f"## {group}\n\n{markdown(('option', 'default', 'what it does'), rows)}")
    fields = [(f"`{name}`", help_text) for name, help_text in FIELDS.items()]
    parts.append(f"## Fields of `--spec` and `--candidate`\n\n{markdown(('field', 'what it does'), fields)}")
    return "\n".join(parts)


def trials_tables(folder: str) -> str:
    """Return the tables of all trials of `tools.calibrate` in a folder."""
    files = sorted((ROOT / folder).glob("*.jsonl.gz"))
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    return calibrate.tables(map(json.loads, lines))


# The function that makes a table, by its name in a page; each takes what the table is made from
TABLES: dict[str, Callable[[str], str]] = {
    "baselines": baselines_table,  # a folder
    "output": output_block,
    "commands": commands_list,  # the times of the commands
    "options": options_tables,  # the declared options
    "speedups": speedups_table,
    "trials": trials_tables,
    "clocks": clocks_table,  # a result of tools/plain_timing.py
}


def updated(page: str) -> str:
    """Return the text of a Markdown page with all generated tables made again."""

    def made(found: re.Match[str]) -> str:
        begin, kind, source, end = found.groups()
        if kind in TABLES:
            table = TABLES[kind](source)
        elif any(question.title == kind for question in read_questions()):
            table = question_block(source, kind)
        else:
            table = experiments_block(source, kind)
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
        write_plots(Path(folder), read_document(ROOT / PICTURED))
        shutil.copy(Path(folder) / "scaling.png", PICTURE)


if __name__ == "__main__":
    main()
