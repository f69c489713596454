"""README.md, CHANGELOG.md and the pages of docs/: size, lines, tables, commands, names and links."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.plugin.options.option_table import FIELDS, OPTIONS
from ddpperf.results import metrics
from tests.project import REPOSITORY
from tools import update_docs

DOCS = REPOSITORY / "docs"
PAGES = (
    REPOSITORY / "README.md",
    *sorted(DOCS.glob("*.md")),
    REPOSITORY / "perf" / "baselines" / "README.md",
)
MOST_COLUMNS = 100
API = (DOCS / "own-suite.md").read_text().partition("## Public names")[2]
OTHER_TOOLS = {  # options, but not pytest's
    *("--bad", "--between", "--good"),
    *("--adapter", "--baseline", "--build-arg", "--csv", "--curves", "--exclusive", "--gpu-hour-price"),
    *(
        "--gpus-per-node",
        "--ipc",
        "--json",
        "--master-addr",
        "--master-port",
        "--minutes",
        "--name",
        "--nnodes",
    ),
    *("--no-python", "--node-rank", "--nodelist", "--nproc-per-node", "--plots", "--preserve-status"),
    *("--run", "--seconds", "--signal"),
}
over_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def prose(page: Path) -> Iterator[str]:
    """Yield the lines of a page without made tables, fenced blocks and table rows."""
    text = re.sub(
        r"<!-- made by .*?<!-- end -->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    yield from (line for line in text.splitlines() if not line.startswith("|"))


def commands(page: Path) -> list[str]:
    """Return the page's command lines that run pytest on perf/, continued lines joined."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\\\n|\n {4}(?=--)", " ", text)
    text = text.replace(" --node-key=./node.key", "")  # in the output of a run that an older version stored
    return [found[1] for found in re.finditer(r"(?<![\w/-])pytest( +perf/[^\n`]*)", text)]


# --- generated parts and size


def test_generated_pages_are_current() -> None:
    stale = [path.name for path, text in update_docs.pages() if not path.exists() or path.read_text() != text]
    assert stale == [], "run python -m tools.update_docs"


def test_each_page_of_results_has_a_source() -> None:
    assert {path.stem for path in (DOCS / "results").iterdir()} == update_docs.PAGES.keys()


def test_options_and_fields_are_few() -> None:
    assert (len(OPTIONS), len(FIELDS)) <= (29, 10)


def test_pages_are_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().split()) <= 1500
    assert sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= 25_000
    assert len((REPOSITORY / "CHANGELOG.md").read_text().split()) <= 2500
    stored = (path for folder in (DOCS, REPOSITORY / "perf" / "baselines") for path in folder.rglob("*.*"))
    assert sum(path.stat().st_size for path in stored) <= 8_200_000, "they are most of a clone"


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=lambda page: page.name)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > MOST_COLUMNS] == []


# --- commands, options and names


@over_pages
def test_commands_parse(page: Path, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    for command in commands(page):
        here = re.sub(r"(--base|--candidate) \.\./\S+", rf"\1 {tmp_path}", command)
        here = re.sub(r"(--base|--candidate) /\S+/python\S*", rf"\1 {sys.executable}", here)
        here = re.sub(r"=/(path/to|srv/reports)/", f"={tmp_path}/", here)
        words = shlex.split(here, comments=True)
        named = pytestconfig._parser.parse(words, Namespace()).file_or_dir
        missing = [word for word in named if not (REPOSITORY / word.partition("::")[0]).exists()]
        assert missing == [], command


@over_pages
def test_named_options_exist(page: Path, pytestconfig: pytest.Config) -> None:
    groups = (pytestconfig._parser._anonymous, *pytestconfig._parser._groups)
    declared = {name for group in groups for option in group.options for name in option.names()}
    option = r"(?<![\w-])--[a-z][a-z-]*[a-z](?!-?\.\.\.)\b(?!-)"
    named = {name for line in prose(page) for name in re.findall(option, line)}
    assert named - declared - OTHER_TOOLS == set()


@over_pages
def test_named_files_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`((?:perf|ddpperf|tools|tests|docs|\.github)/[\w/.-]*)`", text))
    shown = set(re.findall(r"^```\w+\n# (\S+)$", page.read_text(), re.MULTILINE))  # files of an example
    assert [path for path in sorted(named - shown) if not (REPOSITORY / path).exists()] == []


def test_runs_named_in_the_pages_exist() -> None:
    text = (DOCS / "limits.md").read_text()
    names = set(re.findall(r"`((?:\d?x?cpu2|h[12]00x\d)-\w+)`", text))
    assert len(names) > 10
    assert [name for name in names if not (DOCS / "runs" / f"{name}.json.gz").exists()] == []


def test_metrics_are_printed_as_said() -> None:
    page = (DOCS / "experiments.md").read_text()
    tables = re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = [row.split("|") for table in tables for row in table.splitlines()[2:]]
    assert len(rows) > 40
    for _, names, heading, *_ in rows:
        found = [metrics.find(name) for name in re.findall(r"`(\w+)`", names)]
        assert ", ".join(metric.heading for metric in found) == heading.strip()


@over_pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if re.match(r"https?://", target):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
        }


# --- rooms and public names


def test_reading_the_code_names_every_room() -> None:
    text = (DOCS / "reading-the-code.md").read_text()
    inner = (REPOSITORY / "ddpperf").glob("[!_]*")
    rooms = {path.name for path in inner if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert set(re.findall(r"^\| `ddpperf/(\w+(?:\.py)?)/?` \|", text, re.MULTILINE)) == rooms
    folders = {path.parent.name for path in (REPOSITORY / "tests").glob("*/*.py")}
    assert set(re.findall(r"^\| `tests/(\w+)/` \|", text, re.MULTILINE)) == folders


@pytest.mark.parametrize("name", re.findall(r"^\| `(ddpperf[\w.]*)` \|", API, re.MULTILINE))
def test_public_name_exists(name: str) -> None:
    try:
        found: object = importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
    assert found.__doc__


@pytest.mark.parametrize("command", re.findall(r"^\| `python -m (ddpperf[\w.]*)` \|", API, re.MULTILINE))
def test_public_command_explains_itself(command: str) -> None:
    ended = subprocess.run([sys.executable, "-m", command, "--help"], capture_output=True, text=True)
    assert (ended.returncode, f"python -m {command}" in ended.stdout) == (0, True)
