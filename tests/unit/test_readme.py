"""The README and the pages of docs/: tables, commands, links and lines."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from ddpperf.results import metrics, units
from tests.project import REPOSITORY, script

README = REPOSITORY / "README.md"
PAGES = (README, *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "perf" / "baselines" / "README.md")
MOST_WORDS = 1500
MOST_COLUMNS = 100
OTHER_TOOLS = {
    "--cpu-bind",
    "--join",
    "--key",
    "--kill-on-bad-exit",
    "--master-addr",
    "--nnodes",
    "--node-rank",
    "--nproc-per-node",
    "--rdzv-backend",
    "--relative",
    "--standalone",
    "--wait",
    "--baseline",
    "--build-arg",
    "--curves",
    "--editable",
    "--exclusive",
    "--gpus-per-node",
    "--ipc",
    "--nodelist",
    "--storage",
    "--signal",
    "--time",
    "--preserve-status",
    "--adapter",
    "--average",
    "--csv",
    "--file",
}  # options, but not pytest's


@pytest.fixture(scope="module")
def update_readme() -> ModuleType:
    return script("update_readme")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the page's lines with their numbers, without made tables, fenced blocks and table rows."""
    text = re.sub(
        r"<!-- made by .*?<!-- end -->|^```.*?^```",
        lambda found: "\n" * found[0].count("\n"),
        page.read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            yield number, line


def commands(page: Path) -> list[str]:
    """Return the page's command lines that run pytest on perf/, continued lines joined."""
    written = re.sub(r"<!-- made by .*?<!-- end -->|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    text = written.replace("\\\n", " ")
    return [found[1] for found in re.finditer(r"(?<![\w/-])pytest( +perf/[^\n`]*)", text)]


def in_this_machines_places(command: str, folder: Path) -> str:
    """Replace the paths of an example by paths that exist here."""
    command = re.sub(r"(--[a-z-]+-root)=\S+", rf"\1={folder}", command)
    command = re.sub(r"(--candidate|--base)=(\"[^\"]+\"|\S+)", rf"\1={sys.executable}", command)
    return re.sub(r"=/(path/to|srv/reports)/", f"={folder}/", command)


# --- tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_made_tables_are_current(update_readme: ModuleType, page: Path) -> None:
    text = page.read_text()
    assert update_readme.updated(text, {}) == text
    assert page in update_readme.PAGES or not update_readme.MADE.search(text)


def test_each_made_table_has_a_known_source(update_readme: ModuleType) -> None:
    sources = [
        source for page in update_readme.PAGES for source in update_readme.MADE.findall(page.read_text())
    ]
    assert len(sources) > 10
    for source in sources:
        assert any((REPOSITORY / word).exists() or list(REPOSITORY.glob(word)) for word in source.split()), (
            source
        )


def test_row_over_runs_is_their_median(update_readme: ModuleType) -> None:
    sources = update_readme.MADE.findall((REPOSITORY / "docs" / "h200x4.md").read_text())
    (pattern,) = (
        source.removeprefix(update_readme.ALL_RUNS)
        for source in sources
        if source.startswith(update_readme.ALL_RUNS)
    )
    rows = [
        row.strip("| ").split(" | ")
        for row in update_readme.over_runs(pattern).partition("\n\n")[0].splitlines()[2:]
    ]
    runs = [json.loads(path.read_text())["benchmarks"] for path in REPOSITORY.glob(pattern)]
    assert len({name for name, *_ in rows}) == len(rows) > 10
    for name, middle, spread, count, efficiency, cpu in rows:
        stored = [benchmark for run in runs for benchmark in run if benchmark["name"] == name]
        seconds = sorted(benchmark["stats"]["median"] for benchmark in stored)
        assert count == str(len(stored))
        warned = any(
            note["kind"] == "warning" for run in stored for note in run["extra_info"]["ddpperf"]["notes"]
        )
        assert middle == units.seconds(median(seconds)) + " \\*" * warned
        assert spread == f"{units.seconds(seconds[0])} to {units.seconds(seconds[-1])}"
        if efficiency != "-":
            values = [
                benchmark["extra_info"]["ddpperf"]["metrics"]["efficiency"]["value"] for benchmark in stored
            ]
            assert efficiency == f"{median(values):.1%}"
        counted = [benchmark["extra_info"]["ddpperf"] for benchmark in stored]
        slowest = [
            max(entry["samples"][0]["counters"]["cpu_seconds"][: entry["spec"]["world_size"]])
            for entry in counted
        ]
        assert cpu == units.seconds(median(slowest))


# --- words and lines


def test_readme_has_at_most_1500_words() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize(
    "page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    long = [f"{page.name}:{number}" for number, line in prose(page) if len(line) > MOST_COLUMNS]
    assert long == []


# --- commands, options and names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_parse(page: Path, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    for command in commands(page):
        words = shlex.split(in_this_machines_places(command, tmp_path), comments=True)
        parsed = pytestconfig._parser.parse(words, Namespace())
        missing = [
            word
            for word in parsed.file_or_dir
            if not (REPOSITORY / word.partition("::")[0]).exists() and word != "perf/test_mine.py"
        ]
        assert missing == [], command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_options_exist(page: Path, pytestconfig: pytest.Config) -> None:
    declared = {
        name
        for option in [
            *pytestconfig._parser._anonymous.options,
            *(option for group in pytestconfig._parser._groups for option in group.options),
        ]
        for name in option.names()
    }
    named = {
        name
        for _, line in prose(page)
        for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!-?\.\.\.)\b(?!-)", line)
        if "all_reduce_perf" not in line
    }
    assert named - declared - OTHER_TOOLS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_files_exist(page: Path) -> None:
    named = {
        path
        for _, line in prose(page)
        for path in re.findall(r"`((?:perf|ddpperf|tools|tests|docs)/[\w/.-]*)`", line)
    }
    shown = set(re.findall(r"^```\w+\n# (\S+)$", page.read_text(), re.MULTILINE))  # files of an example
    assert [path for path in sorted(named - shown) if not (REPOSITORY / path).exists()] == []


def test_metrics_are_printed_as_said() -> None:
    page = (REPOSITORY / "docs" / "experiments.md").read_text()
    tables = re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = [row.split("|") for table in tables for row in table.splitlines()[2:]]
    assert len(rows) > 40
    for _, names, heading, *_ in rows:
        found = [metrics.find(name) for name in re.findall(r"`(\w+)`", names)]
        assert ", ".join(metric.heading for metric in found) == heading.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(line for _, line in prose(page))):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
