"""The verdict as Markdown: first of all, never an earlier run's, and nothing in it is markup."""

from __future__ import annotations

import pytest

from ddpperf.report.markdown import markdown
from tests.canned import CannedSuite


@pytest.fixture
def project(canned_suite: CannedSuite) -> CannedSuite:
    """Return a project whose runs take place in this process."""
    return canned_suite


def test_verdict_comes_first_and_is_no_markup() -> None:
    reasons = ["a failed: expected ```three``` *stars*", "second"]
    document = {"benchmarks": [], "ddpperf": {"verdict": {"status": "FAIL", "reasons": reasons}}}
    page = markdown(document, ["a table", "with `one` tick"]).splitlines()
    assert page[:6] == [
        "## ddpperf: FAIL",
        "",
        "````text",
        "a failed: expected ```three``` *stars*",
        "second",
        "````",
    ]
    assert page[6:] == [
        *(
            "",
            "<details><summary>all tests</summary>",
            "",
            "```text",
            "a table",
            "with `one` tick",
            "```",
            "",
            "</details>",
        ),
    ]


def test_ab_page_has_every_metric() -> None:
    figures = {
        "base": 2e9,
        "candidate": 3e9,
        "ratio": 1.5,
        "low": 1.4,
        "high": 1.6,
        "detectable": 0.01,
        "confirmed": False,
        "control": None,
    }
    rows = [
        figures | {"test": test, "metric": metric, "gated": metric == "time", "finding": "worse"}
        for metric in ("time", "busbw_bytes_per_second", "peak_memory_bytes")
        for test in ("x.py::a", "x.py::b")
    ]
    header = {"verdict": {"status": "FAIL", "reasons": ["a"]}, "against": {"rows": rows}}
    document = {"benchmarks": [], "ddpperf": header}
    page = markdown(document, ["a table"]).splitlines()
    table = page[page.index("<details><summary>base and candidate</summary>") + 3 : -2]
    assert [line.split()[:2] for line in table[1:-1]] == [
        [test, metric] for test in "ab" for metric in ("time", "busbw_bytes_per_second", "peak_memory_bytes")
    ]
    assert table[1].split()[2:7] == ["1.500", "1.400", "to", "1.600", "worse"]
    assert table[1].endswith("1.0%")
    assert table[2].split()[6:12] == ["for", "information", "2", "GB/s", "3", "GB/s"]


def test_page_is_written_where_requested(project: CannedSuite) -> None:
    summary = project.root / "summary.md"
    summary.write_text("an earlier step\n")
    project.environment["GITHUB_STEP_SUMMARY"] = str(summary)
    run = project.run("perf", "--verdict", "verdict.md")
    run.assert_one_sentence(0, "saved the verdict: verdict.md")
    page = (project.root / "verdict.md").read_text()
    assert page.startswith("## ddpperf: PASS\n\n```text\n1 test measured, not compared")
    assert "COLLECTIVES  2 ranks" in page
    assert summary.read_text() == "an earlier step\n" + page
    project.environment["GITHUB_STEP_SUMMARY"] = "/nowhere/summary.md"
    project.run("perf").assert_one_sentence(
        4, "the step's summary was not saved: /nowhere/summary.md cannot be written"
    )


def test_earlier_page_is_removed(project: CannedSuite) -> None:
    page = project.root / "verdict.md"
    page.write_text("## ddpperf: PASS")
    assert project.run("perf", "-k", "nothing", "--verdict", "verdict.md").status == 125
    assert page.read_text().startswith("## ddpperf: NO VERDICT\n\n```text\nall 1 tests were deselected")
    assert project.run("perf", "--verdict", "verdict.md", "--precision", "tf32").status == 4
    assert not page.exists()


def test_other_files_are_not_replaced(project: CannedSuite) -> None:
    thresholds = project.root / "perf" / "thresholds.toml"
    thresholds.write_text("# mine\n")
    run = project.run("perf", "--verdict", "perf/thresholds.toml")
    run.assert_one_sentence(
        4, "--verdict replaces earlier verdicts only, got 'perf/thresholds.toml'; name another file"
    )
    assert thresholds.read_text() == "# mine\n"
    (project.root / "empty.md").touch()
    assert project.run("perf", "--verdict", "empty.md").status == 0, "as of mktemp"


@pytest.mark.parametrize("wrong", ["nowhere/verdict.md", "perf", "", "/dev/null"])
def test_page_that_cannot_be_written_is_refused(project: CannedSuite, wrong: str) -> None:
    project.run("perf", f"--verdict={wrong}").assert_one_sentence(4, f"got {wrong!r}; name another")
    assert project.saved_runs() == []
