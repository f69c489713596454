"""What the action publishes on GitHub: annotation, check and comment, by a command `gh` of the tests."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fake_gh import READ_TOKEN, TOKEN, Held, held, install
from tests.project import REPOSITORY
from tests.workflow import ACTION

PAGE = "## ddpperf: FAIL\n\n```text\nx.py::a is worse: its time is 5% longer\n```\n"
TABLE = "<details><summary>all</summary>\n\n```text\n{lines}\n```\n\n</details>\n"


@dataclass
class Job:
    """A job with the output folder of a run whose verdict is FAIL, on pull request 5."""

    folder: Path
    variables: dict[str, str]

    def publish(self, status: int = 1, **variables: str) -> list[str]:
        """Run the script, which never fails; return the lines that it printed."""
        ended = subprocess.run(
            [REPOSITORY / ACTION / "publish.sh"],
            env=os.environ | self.variables | {"STATUS": str(status)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout.splitlines()

    def write(self, page: str) -> None:
        (self.folder / "verdict.md").write_text(page)

    @property
    def github(self) -> Held:
        return held(self.variables)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "verdict.md").write_text(PAGE)
    (folder / "output.txt").write_text("ERROR: no `x` \x1b[31m\x9b images\n")
    files = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    more = {"GH_TOKEN": TOKEN, "FOLDER": str(folder), "SHA": "a" * 40, "PULL": "5"}
    return Job(folder, install(tmp_path / "bin") | more | files)


def test_check_names_verdict_and_commit(job: Job) -> None:
    assert job.publish() == ["::error title=ddpperf::FAIL: x.py::a is worse: its time is 5%25 longer"]
    assert Path(job.variables["GITHUB_STEP_SUMMARY"]).read_text() == PAGE
    (check,) = job.github["checks"]
    assert check == {
        "name": "ddpperf: merge gate / gate",
        "head_sha": "a" * 40,
        "status": "completed",
        "conclusion": "failure",
        "details_url": "https://github.com/team/ddpperf/actions/runs/7",
        "output[title]": "FAIL: x.py::a is worse: its time is 5% longer",
        "output[summary]": PAGE,
    }


@pytest.mark.parametrize(
    ("status", "verdict", "conclusion", "level"),
    [
        (0, "PASS", "success", "notice"),
        (1, "FAIL", "failure", "error"),
        (125, "NO VERDICT", "neutral", "warning"),
        (0, "FAIL", "failure", "error"),
        (137, "PASS", "failure", "error"),
    ],
)
def test_only_the_verdict_of_the_status_is_no_failure(
    job: Job, status: int, verdict: str, conclusion: str, level: str
) -> None:
    job.write(PAGE.replace("FAIL", verdict))
    (said,) = job.publish(status)
    assert said.startswith(f"::{level} title=ddpperf::")
    assert verdict in said
    assert [check["conclusion"] for check in job.github["checks"]] == [conclusion]


def test_refused_run_shows_its_log_without_control_characters(job: Job) -> None:
    (job.folder / "verdict.md").unlink()
    (said,) = job.publish(4)
    assert said == "::error title=ddpperf::no verdict, exit status 4: no `x` ?[31m? images"
    (check,) = job.github["checks"]
    assert "```text\nERROR: no 'x' ?[31m? images\n```\n" in check["output[summary]"]
    job.write(PAGE.replace("x.py", "\x1b]0;owned\x07x.py"))
    assert "FAIL: ?]0;owned?x.py::a is worse" in job.publish()[0]


def test_comment_is_edited_and_others_are_kept(job: Job) -> None:
    job.publish(GITHUB_JOB="another")
    job.publish()
    job.write(PAGE.replace("5%", "7%"))
    job.publish()
    another, comment = job.github["comments"]
    assert "5%" in another["body"]
    assert comment["issue"] == 5
    assert comment["body"].startswith("<!-- ddpperf: merge gate / gate -->\n[merge gate / gate](https://gi")
    assert comment["body"].endswith(PAGE.replace("5%", "7%"))
    job.publish(PULL="")
    assert len(job.github["comments"]) == 2


def test_long_page_keeps_the_verdict(job: Job) -> None:
    job.write(PAGE + TABLE.format(lines="é" * 70_000))
    job.publish()
    text = job.github["checks"][0]["output[summary]"]
    assert text == f"{PAGE}\nThe rest is too long for GitHub. It is in verdict.md of the artifact.\n"
    job.write(PAGE.replace("longer\n", "longer\n" + "x is worse\n" * 8_000))
    job.publish()
    text = job.github["checks"][1]["output[summary]"]
    assert text.count("```") == 2


def test_refusal_of_github_is_a_warning(job: Job) -> None:
    verdict, check, comment = job.publish(GH_TOKEN=READ_TOKEN)
    why = "Resource not accessible by integration (HTTP 403)"
    assert verdict.startswith("::error title=ddpperf::FAIL: ")
    assert check.startswith(f"::warning title=ddpperf::no check was published: gh: {why}")
    assert comment.startswith(f"::warning title=ddpperf::no comment was published: gh: {why}")


def test_without_token_only_the_annotation_is_shown(job: Job) -> None:
    assert job.publish(GH_TOKEN="") == [
        "::error title=ddpperf::FAIL: x.py::a is worse: its time is 5%25 longer"
    ]
    assert job.github == {"comments": [], "checks": []}
