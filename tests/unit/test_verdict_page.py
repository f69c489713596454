"""The verdict as Markdown: first of all, never an earlier run's, and nothing in it is markup."""

from __future__ import annotations

import pytest

from ddpperf.report.markdown_pages import github_annotations, markdown
from ddpperf.report.summary import summary_lines
from tests.canned import CannedSuite
from tests.unit.test_comparison import compared
from tests.unit.test_summary import calls


def test_verdict_comes_first_and_is_no_markup() -> None:
    reasons = ["a failed: expected ```three``` *stars*", "second"]
    run = calls(1024)
    run["ddpperf"]["verdict"] = {"status": "FAIL", "reasons": reasons}
    page = markdown(run).splitlines()
    assert page[:5] == ["## ddpperf: FAIL", "", "````text", *reasons]
    assert page[page.index("````") + 2 :][:3] == ["<details><summary>all tests</summary>", "", "```text"]
    assert "COLLECTIVES  2 GPUs, 1 KiB, eager" in page


def test_page_of_a_comparison_shows_what_changed_as_the_terminal_does() -> None:
    run = compared()
    page = markdown(run)
    fenced, changes, *_ = page.split("```text\n")[1:]
    assert fenced.startswith("2 of 26 measurements are worse, such as test_weak_scaling[slow-32] by +3.0%")
    assert "next: see it again: python -m pytest" in fenced
    assert changes.startswith("ddpperf on h200x4")
    assert "\nWORSE     2 of 26 measurements" in changes
    shown = changes.partition("```")[0].splitlines()
    assert shown == summary_lines(run, verbose=False)[-len(shown) :]


def test_annotation_stands_at_the_file_of_the_experiment() -> None:
    run = compared()
    (line,) = github_annotations(run)
    assert line.startswith(
        "::error file=perf/test_it.py,title=ddpperf FAIL%3A 2 measurements worse::weak scaling"
    )
    assert line.endswith("by +2.0%25 (+2.000 ms)")
    assert "\n" not in line
    assert github_annotations(compared(status="PASS")) == []


def test_page_is_written_where_requested(canned_suite: CannedSuite) -> None:
    (canned_suite.root / "verdict.md").touch()  # as of mktemp
    run = canned_suite.run("perf", "--verdict", "verdict.md")
    run.assert_one_sentence(0, "saved the verdict: verdict.md")
    page = (canned_suite.root / "verdict.md").read_text()
    assert page.startswith("## ddpperf: PASS\n\n```text\n1 test measured, not compared")
    assert "COLLECTIVES  2 ranks" in page


def test_earlier_page_is_removed(canned_suite: CannedSuite) -> None:
    page = canned_suite.root / "verdict.md"
    page.write_text("## ddpperf: PASS")
    assert canned_suite.run("perf", "-k", "nothing", "--verdict", "verdict.md").status == 125
    assert page.read_text().startswith("## ddpperf: NO VERDICT\n\n```text\nall 1 tests were deselected")
    assert canned_suite.run("perf", "--verdict", "verdict.md", "--precision", "tf32").status == 4
    assert not page.exists()


@pytest.mark.parametrize("wrong", ["perf/test_it.py", "nowhere/verdict.md", "", "/dev/null"])
def test_place_that_cannot_be_written_is_refused(canned_suite: CannedSuite, wrong: str) -> None:
    before = canned_suite.experiment.read_text()
    canned_suite.run("perf", f"--verdict={wrong}").assert_one_sentence(4, f"got {wrong!r}; name another")
    assert canned_suite.saved_runs() == []
    assert canned_suite.experiment.read_text() == before
