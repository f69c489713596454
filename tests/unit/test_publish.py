"""What the action publishes: annotation, check, comment and pull request, on a local server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.github_api import READ_TOKEN, TOKEN, GitHubApi, running_api
from tests.project import script
from tests.workflow import ACTION

PAGE = "## ddpperf: FAIL\n\n```text\nx.py::a is worse: its time is 5% longer\n```\n"
TABLE = "<details><summary>{title}</summary>\n\n```text\n{lines}\n```\n\n</details>\n"
Publish = Callable[..., str]  # of the arguments after the folder's; returns the printed lines


@pytest.fixture(scope="module")
def publish_script() -> ModuleType:
    return script("publish", ACTION)


@pytest.fixture
def api() -> Iterator[GitHubApi]:
    with running_api() as api:
        yield api


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a run with the verdict FAIL."""
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "verdict.md").write_text(PAGE)
    return folder


@pytest.fixture
def publish(
    publish_script: ModuleType,
    api: GitHubApi,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Publish:
    event = folder.parent / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 5, "head": {"sha": "a" * 40}}}))
    variables = {
        "GITHUB_API_URL": api.url,
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_JOB": "gate",
        "GITHUB_REF_NAME": "main",
        "GITHUB_REPOSITORY": "team/ddpperf",
        "GITHUB_RUN_ID": "7",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_SHA": "b" * 40,
        "GITHUB_TOKEN": TOKEN,
        "GITHUB_WORKFLOW": "merge gate",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run(what: str, status: int = 1, *more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["publish.py", what, str(status), str(folder), *more])
        assert publish_script.main() == 0
        return capsys.readouterr().out

    return run


def test_check_names_the_pull_requests_commit(publish: Publish, api: GitHubApi) -> None:
    assert publish("check") == (
        "::error title=ddpperf::FAIL: x.py::a is worse: its time is 5%25 longer\n"
        "added the check 'ddpperf: merge gate / gate' with the conclusion failure\n"
    )
    (check,) = api.checks
    assert check["head_sha"] == "a" * 40
    assert check["details_url"] == "https://github.com/team/ddpperf/actions/runs/7"
    assert check["output"] == {"title": "FAIL: x.py::a is worse: its time is 5% longer", "summary": PAGE}


@pytest.mark.parametrize(
    ("status", "verdict", "conclusion", "level"),
    [
        (0, "PASS", "success", "notice"),
        (1, "FAIL", "failure", "error"),
        (125, "NO VERDICT", "neutral", "warning"),
    ],
)
def test_each_verdict_has_its_conclusion(
    publish: Publish, api: GitHubApi, folder: Path, status: int, verdict: str, conclusion: str, level: str
) -> None:
    (folder / "verdict.md").write_text(PAGE.replace("FAIL", verdict))
    assert publish("check", status).startswith(f"::{level} title=ddpperf::{verdict}: x.py::a")
    assert [check["conclusion"] for check in api.checks] == [conclusion]


@pytest.mark.parametrize(
    ("status", "log", "sentence"),
    [
        (3, "INTERNALERROR> ...", "pytest had an internal error; read the traceback in the log"),
        (4, "ERROR: cpu is being measured\n", "cpu is being measured"),
        (5, "collected 0 items", "pytest found no test; correct the path or -k"),
        (137, "", "the run was ended; read the log"),
    ],
)
def test_run_without_a_verdict_shows_its_log(
    publish: Publish, api: GitHubApi, folder: Path, status: int, log: str, sentence: str
) -> None:
    (folder / "verdict.md").unlink()
    (folder / "output.txt").write_text(log)
    assert publish("check", status).startswith(
        f"::error title=ddpperf::no verdict, exit status {status}: {sentence}\n"
    )
    (check,) = api.checks
    assert check["output"]["summary"].startswith(
        f"## ddpperf: no verdict, exit status {status}\n\n```text\n{log}"
    )


def test_comment_behind_a_hundred_others_is_found(publish: Publish, api: GitHubApi) -> None:
    publish("comment")
    mine = api.comments[0]
    others = [{"id": 1000 + number, "issue": 5, "body": None} for number in range(230)]
    api.comments[:0] = others
    assert publish("comment") == "updated the comment on the pull request\n"
    assert len(api.comments) == 231
    assert mine["body"].endswith(PAGE)
    assert api.requests.count("GET /repos/team/ddpperf/issues/5/comments") == 1 + 3


def test_two_jobs_have_two_comments(
    publish: Publish, api: GitHubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("comment")
    monkeypatch.setenv("GITHUB_JOB", "other")
    assert publish("comment") == "added a comment to the pull request\n"
    assert len(api.comments) == 2


def test_night_writes_no_comment(publish: Publish, api: GitHubApi, folder: Path) -> None:
    (folder.parent / "event.json").write_text("{}")
    assert publish("comment") == "no comment, because this job does not belong to a pull request\n"
    publish("check")
    assert [check["head_sha"] for check in api.checks] == ["b" * 40]


def test_long_page_loses_its_last_tables(publish: Publish, api: GitHubApi, folder: Path) -> None:
    short, long = "row\n" * 10, "a row of a table\n" * 3000
    tables = [
        TABLE.format(title=title, lines=lines)
        for title, lines in (("all tests", short), ("all metrics", long))
    ]
    (folder / "verdict.md").write_text(
        "\n".join([PAGE, *tables, TABLE.format(title="explanations", lines=long)])
    )
    publish("comment")
    (comment,) = api.comments
    assert "its time is 5% longer" in comment["body"]
    assert "<summary>all tests</summary>" in comment["body"]
    assert "<summary>all metrics</summary>" in comment["body"]
    assert "<summary>explanations</summary>" not in comment["body"]
    assert comment["body"].endswith("The rest is too long for GitHub. It is in verdict.md of the artifact.")


def test_long_reasons_end_in_a_closed_block(publish: Publish, api: GitHubApi, folder: Path) -> None:
    reasons = "x.py::a is `worse`\n" * 5000
    (folder / "verdict.md").write_text(PAGE.replace("```", "````").replace("x.py", f"{reasons}x.py", 1))
    publish("comment")
    publish("check")
    for text in (api.comments[0]["body"], api.checks[0]["output"]["summary"]):
        assert 65_000 < len(text) <= 65_536
        assert text.count("````") == 2
        assert "is `worse`\n````\n\nThe rest is too long" in text


def test_second_baseline_keeps_the_pull_request(publish: Publish, api: GitHubApi, folder: Path) -> None:
    (folder.parent / "event.json").write_text(json.dumps({"repository": {"default_branch": "trunk"}}))
    assert publish("pull-request", 0, "--branch", "baselines") == (
        "opened the pull request https://github.com/team/ddpperf/pull/1\n"
    )
    assert publish("pull-request", 0, "--branch", "baselines") == (
        "the open pull request of baselines has the new baseline\n"
    )
    (pull,) = api.pulls
    assert (pull["head"], pull["base"]) == ("baselines", "trunk")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("GITHUB_TOKEN", "", "the job has no token; pass token, or leave its default"),
        (
            "GITHUB_TOKEN",
            "old",
            "GitHub answered 401: Bad credentials; a fork's token may only read, and other",
        ),
        ("GITHUB_TOKEN", READ_TOKEN, "GitHub answered 403: Resource not accessible by integration; a fork's"),
        ("GITHUB_REPOSITORY", "team/gone", "GitHub answered 404: Not Found; a fork's token may only read"),
        ("GITHUB_API_URL", "http://127.0.0.1:1", "GitHub did not answer: <urlopen error"),
    ],
)
@pytest.mark.parametrize("what", ["check", "comment", "pull-request"])
def test_refused_request_is_one_warning(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, what: str, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    *_, last = publish(what).splitlines()
    assert last.startswith(f"::warning title=ddpperf::no {what} was published: {why}")


def test_invalid_request_names_all_reasons(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, publish_script: ModuleType
) -> None:
    monkeypatch.setitem(publish_script.CONCLUSIONS, 1, ("unknown", "error"))
    *_, last = publish("check").splitlines()
    assert last.endswith("GitHub answered 422: Validation Failed; the check is not valid")
