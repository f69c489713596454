"""The README's tables are made from stored runs, never typed."""

from __future__ import annotations

import json
import re
from statistics import median
from types import ModuleType

import pytest

from ddpperf.results import units
from tests.project import REPOSITORY, script


@pytest.fixture(scope="module")
def update_readme() -> ModuleType:
    return script("update_readme")


def test_the_readmes_tables_are_what_their_runs_give(update_readme: ModuleType) -> None:
    for page, sources in (
        (
            REPOSITORY / "README.md",
            [r"the first tests in \S+\.json", r"all runs in \S+\*\.json", r"docs/gate/\S+\.json"],
        ),
        (update_readme.PICTURED, [r"\S+\.json", r"\S+\.json and \S+"]),
    ):
        blocks = list(update_readme.MADE.finditer(page.read_text()))
        assert all(re.fullmatch(source, block[1]) for source, block in zip(sources, blocks, strict=True))
        assert "speedup" in blocks[0][0]
    for page in update_readme.PAGES:
        text = page.read_text()
        assert update_readme.updated(text, {}) == text


def test_a_row_over_all_runs_is_the_median_of_theirs(update_readme: ModuleType) -> None:
    _, source, _ = update_readme.MADE.findall((REPOSITORY / "README.md").read_text())
    pattern = source.removeprefix(update_readme.ALL_RUNS)
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
        doubtful = any(
            note.startswith("doubtful") for run in stored for note in run["extra_info"]["ddpperf"]["notes"]
        )
        assert middle == units.seconds(median(seconds)) + " \\*" * doubtful
        assert spread == f"{units.seconds(seconds[0])} to {units.seconds(seconds[-1])}"
        if efficiency != "-":
            values = [
                benchmark["extra_info"]["ddpperf"]["metrics"]["efficiency"]["value"] for benchmark in stored
            ]
            assert efficiency == f"{median(values):.1%}"
        counted = [benchmark["extra_info"]["ddpperf"] for benchmark in stored]
        of_its_ranks = [
            max(each["samples"][0]["counters"]["cpu_seconds"][: each["spec"]["world_size"]])
            for each in counted
        ]
        assert cpu == units.seconds(median(of_its_ranks))
