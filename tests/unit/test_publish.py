"""What the action publishes: annotation, check, comment and pull request, on a local server."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.github_api import READ_TOKEN, GitHubApi, job_variables, running_api
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
    variables = job_variables(api.url) | {
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_JOB": "gate",
        "GITHUB_WORKFLOW": "merge gate",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run(what: str, status: int = 1, *more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["publish.py", what, str(status), str(folder), *more])
        assert publish_script.main() == 0
        return capsys.readouterr().out

    return run


def test_published_text_has_no_control_characters(publish_script: ModuleType, folder: Path) -> None:
    (folder / "verdict.md").write_text(PAGE.replace("x.py", "\x1b]0;owned\x07x.py"))
    result = publish_script.result_of(1, folder)
    assert result.title.startswith("FAIL: ?]0;owned?x.py::a is worse")
    (folder / "verdict.md").unlink()
    (folder / "output.txt").write_text("ERROR: no \x1b[31m\x9b images\n")
    result = publish_script.result_of(4, folder)
    assert result.title.endswith("no ?[31m? images")
    assert "ERROR: no ?[31m? images" in result.page


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


@pytest.mark.parametrize(("status", "verdict"), [(0, "FAIL"), (7, "PASS"), (125, "FAIL"), (137, "PASS")])
def test_page_of_another_verdict_is_a_failure(
    publish: Publish, api: GitHubApi, folder: Path, status: int, verdict: str
) -> None:
    (folder / "verdict.md").write_text(PAGE.replace("FAIL", verdict))
    title = f"::error title=ddpperf::exit status {status} after {verdict}: x.py::a"
    assert publish("check", status).startswith(title)
    assert [check["conclusion"] for check in api.checks] == ["failure"]


@pytest.mark.parametrize(
    ("status", "log", "sentence"),
    [
        (0, "1 passed\n", "no performance test was measured; correct the arguments"),
        (3, "INTERNALERROR> ...", "pytest had an internal error; read the traceback in the log"),
        (4, "ERROR: cpu is being measured\n", "cpu is being measured"),
        (5, "collected 0 items", "pytest found no test; correct the path"),
        (125, "", "the run was ended; read the log"),
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
    assert check["conclusion"] == "failure"
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
    monkeypatch.setitem(publish_script.VERDICTS, 1, ("FAIL", ("unknown", "error")))
    *_, last = publish("check").splitlines()
    assert last.endswith("GitHub answered 422: Validation Failed; the check is not valid")


@pytest.mark.parametrize("event", ["", "null", "[]", '{"pull_request": {"number": 5}}'])
def test_unexpected_event_is_one_warning(publish: Publish, folder: Path, event: str) -> None:
    (folder.parent / "event.json").write_text(event)
    *_, last = publish("comment").splitlines()
    assert last.startswith("::warning title=ddpperf::no comment was published: unexpected data: ")


def test_folder_as_page_is_no_verdict(publish: Publish, folder: Path) -> None:
    (folder / "verdict.md").unlink()
    (folder / "verdict.md").mkdir()
    assert publish("check").startswith("::error title=ddpperf::no verdict, exit status 1: the run was ended")


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("comment", None),
        ("comment", [None]),
        ("comment", {"a": 1}),
        ("pull-request", None),
        ("pull-request", []),
        ("pull-request", {"a": 1}),
    ],
)
def test_unexpected_answer_is_one_warning(
    publish: Publish, api: GitHubApi, monkeypatch: pytest.MonkeyPatch, what: str, answer: Any
) -> None:
    def answers(method: str, *_: Any) -> tuple[int, Any, str]:
        return 200, answer if (method, what) != ("GET", "pull-request") else [], ""

    monkeypatch.setattr(api, "answer", answers)
    (line,) = publish(what).splitlines()
    assert line.startswith(f"::warning title=ddpperf::no {what} was published: unexpected data: ")


@pytest.mark.parametrize("code", [301, 302, 307, 308])
@pytest.mark.parametrize("what", ["check", "comment"])
def test_redirect_is_not_followed(
    publish: Publish, api: GitHubApi, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    """urllib would send a GET in place of a POST, and the token to any host."""
    requests: list[str] = []

    def moved(method: str, path: str, *_: Any) -> tuple[int, Any, str]:
        requests.append(f"{method} {path}")
        return code, {"message": "Moved"}, f"{api.url}/elsewhere"

    monkeypatch.setattr(api, "answer", moved)
    *_, last = publish(what).splitlines()
    assert f"no {what} was published: GitHub answered {code}: {api.url}/repos/team/ddpperf/" in last
    assert last.endswith(f" has moved to {api.url}/elsewhere; run the job of that repository")
    assert len(requests) == 1


def test_list_without_an_end_is_one_warning(
    publish: Publish, api: GitHubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "answer", lambda *_: (200, [], f'<{api.url}/again>; rel="next"'))
    assert "the list of issues/5/comments has more than 50 pages" in publish("comment")


def test_slow_answer_ends_after_the_time_limit(
    publish: Publish, publish_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends a byte now and then never reaches the time limit of one read."""
    monkeypatch.setattr(publish_script, "MOST_SECONDS", 1)
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"1", seconds=0.1) as url:
        monkeypatch.setenv("GITHUB_API_URL", url)
        *_, last = publish("check").splitlines()
    assert last == "::warning title=ddpperf::no check was published: GitHub took longer than 1 s"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", b"hello\r\n\r\n"])
def test_broken_answer_is_one_warning(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with answering(answer) as url:
        monkeypatch.setenv("GITHUB_API_URL", url)
        *_, last = publish("check").splitlines()
    assert last.startswith("::warning title=ddpperf::no check was published: GitHub did not answer: ")


@contextmanager
def answering(first: bytes, again: bytes = b"", seconds: float = 0) -> Iterator[str]:
    """Start a server that sends these bytes, and then `again` every few seconds until nobody reads."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(first)
            with suppress(OSError):
                while again:
                    time.sleep(seconds)
                    self.request.sendall(again)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
