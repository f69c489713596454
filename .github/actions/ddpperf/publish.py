"""Show the verdict of a run on GitHub: as an annotation, a check, a comment or a pull request.

    publish.py check STATUS FOLDER
    publish.py comment STATUS FOLDER
    publish.py pull-request STATUS FOLDER --branch BRANCH

STATUS is the exit status of pytest, and FOLDER is the output folder of the action. Everything else
comes from the environment variables of GitHub Actions. A runner has Python for sure, but perhaps
neither gh nor jq, so the script needs the standard library only.

The script never changes the verdict: if something cannot be published, the script prints one sentence
as a warning and ends with status 0.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 65_536  # of a comment; a check takes one character less
SECONDS = 30  # until a connection is made, and for each part of an answer
MOST_SECONDS = 120  # for everything
MOST_PAGES = 50  # of 100 comments
LOG_LINES = 20  # of a run without a verdict
FAILURE = ("failure", "error")  # the conclusion of a check, and the level of its annotation
# By exit status: the verdict that the page must have, and the conclusion and level of this verdict.
VERDICTS = {
    0: ("PASS", ("success", "notice")),
    1: ("FAIL", FAILURE),
    125: ("NO VERDICT", ("neutral", "warning")),
}
# What the exit statuses of a run without a verdict mean.
MEANINGS = {
    0: "no performance test was measured; correct the arguments",
    3: "pytest had an internal error; read the traceback in the log",
    4: "ddpperf refused the run; read the last lines of the log",
    5: "pytest found no test; correct the path",
}
FOLDED = re.compile(r"<details><summary>(.*?)</summary>.*?</details>\n?", re.DOTALL)
RIGHTS = "; a fork's token may only read, and other jobs need checks: write and pull-requests: write"
CUT = "The rest is too long for GitHub. It is in verdict.md of the artifact."


class NotPublished(Exception):
    """GitHub did not take a request; the text says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run: its verdict in one line, and as a Markdown page."""

    conclusion: str
    level: str
    title: str
    page: str


def result_of(status: int, folder: Path) -> Result:
    """Read the result of a run from the files in the output folder.

    A refused run writes no verdict, so the last lines of its log stand for the page.
    """
    log = _text(folder / "output.txt").rstrip().splitlines()
    page = _text(folder / "verdict.md")
    expected, (conclusion, level) = VERDICTS.get(status, ("", FAILURE))
    if found := re.match(r"## ddpperf: (.*)\n+`{3,}text\n(.*)", page):
        title = f"{found[1]}: {found[2]}"
        if found[1] != expected:
            title, (conclusion, level) = f"exit status {status} after {title}", FAILURE
    else:
        errors = [line.removeprefix("ERROR: ") for line in log if line.startswith("ERROR: ")]
        meaning = errors[0] if errors else MEANINGS.get(status, "the run was ended; read the log")
        title, (conclusion, level) = f"no verdict, exit status {status}: {meaning}", FAILURE
        page = "\n".join([f"## ddpperf: no verdict, exit status {status}", "", *_fenced(log[-LOG_LINES:])])
    return Result(conclusion=conclusion, level=level, title=title, page=page)


def _text(path: Path) -> str:
    text = path.read_text(errors="replace") if path.is_file() else ""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)  # what a terminal obeys


def _fenced(lines: list[str]) -> list[str]:
    """Return a Markdown code block, whose fence has more backticks than any line."""
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence, ""]


def shortened(page: str, limit: int) -> str:
    """Shorten a Markdown page to at most `limit` characters.

    The folded tables go first, the last one before the others. If the verdict and its reasons are too
    long by themselves, their code block ends early.
    """
    if len(page) <= limit:
        return page
    for table in reversed(list(FOLDED.finditer(page))):
        page = page[: table.start()] + page[table.end() :]
        if len(page) + len(CUT) + 2 <= limit:
            return f"{page.rstrip()}\n\n{CUT}"
    fence = found[0] if (found := re.search("`{3,}", page)) else ""
    ending = f"\n{fence}\n\n{CUT}"
    kept = page[: limit - len(ending)]
    return kept[: kept.rfind("\n")] + ending


def annotation(result: Result) -> str:
    """Return the workflow command that shows the result on the page of the workflow run."""
    text = result.title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{result.level} title=ddpperf::{text}"


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Lets a redirect be an error: urllib would make a GET of a POST, and send the token to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class GitHub:
    """The API of GitHub for one repository."""

    url: str
    repository: str
    token: str

    def __post_init__(self) -> None:
        if not self.token:
            raise NotPublished("the job has no token; pass token, or leave its default")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, and return the answer's JSON."""
        answer, _ = self._request(method, f"{self.url}/repos/{self.repository}/{path}", body)
        return answer

    def all_pages(self, path: str) -> list[Any]:
        """Return the entries of all pages of a list."""
        entries: list[Any] = []
        following = f"{self.url}/repos/{self.repository}/{path}?per_page=100"
        for _ in range(MOST_PAGES):
            page, links = self._request("GET", following, None)
            entries += page
            if not (found := re.search(r'<([^>]+)>; rel="next"', links)):
                return entries
            following = found[1]
        raise NotPublished(f"the list of {path} has more than {MOST_PAGES} pages")

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> tuple[Any, str]:
        """Return the answer's JSON and its Link header; raise NotPublished if GitHub refuses."""
        headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {self.token}",
            "User-Agent": "ddpperf",
            "X-GitHub-Api-Version": "2022-11-28",
        }
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.build_opener(NoRedirects).open(request, timeout=SECONDS) as answer:
                return json.load(answer), answer.headers.get("Link", "")
        except urllib.error.HTTPError as error:
            with error:
                why = f"GitHub answered {error.code}: {_message(error.read())}"
            if place := error.headers.get("Location"):
                advice = "run the job of that repository"
                why = f"GitHub answered {error.code}: {url} has moved to {place}; {advice}"
            raise NotPublished(why + (RIGHTS if error.code in (401, 403, 404) else "")) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotPublished(f"GitHub did not answer: {error}") from error


def _message(body: bytes) -> str:
    """Return the sentences of an error that GitHub answers as JSON."""
    try:
        answer = json.loads(body)
        more = [error["message"] for error in answer.get("errors", []) if "message" in error]
        return "; ".join([answer["message"], *more])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode(errors="replace")[:200]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of GitHub Actions that runs this script, from its environment variables."""

    name: str
    sha: str
    run_url: str
    branch: str
    event: Mapping[str, Any]

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Job:
        path = variables.get("GITHUB_EVENT_PATH")
        event = json.loads(Path(path).read_text()) if path else {}
        pull = event.get("pull_request")
        repository = f"{variables['GITHUB_SERVER_URL']}/{variables['GITHUB_REPOSITORY']}"
        return cls(
            name=f"{variables['GITHUB_WORKFLOW']} / {variables['GITHUB_JOB']}",
            # A pull request's job runs on a merge commit, which shows no checks.
            sha=pull["head"]["sha"] if pull else variables["GITHUB_SHA"],
            run_url=f"{repository}/actions/runs/{variables['GITHUB_RUN_ID']}",
            branch=variables["GITHUB_REF_NAME"],
            event=event,
        )

    @property
    def link(self) -> str:
        return f"[{self.name}]({self.run_url}), commit {self.sha[:9]}"


def publish_check(github: GitHub, job: Job, result: Result) -> str:
    """Add a check to the commit. Only a check can be neutral, which stands for NO VERDICT."""
    summary = shortened(result.page, MOST_CHARACTERS - 1)
    check = {
        "name": f"ddpperf: {job.name}",
        "head_sha": job.sha,
        "status": "completed",
        "conclusion": result.conclusion,
        "details_url": job.run_url,
        "output": {"title": shortened_line(result.title), "summary": summary},
    }
    github.request("POST", "check-runs", check)
    return f"added the check '{check['name']}' with the conclusion {result.conclusion}"


def shortened_line(text: str) -> str:
    return text if len(text) <= 250 else f"{text[:250]}..."


def publish_comment(github: GitHub, job: Job, result: Result) -> str:
    """Write the verdict into this job's comment on the pull request; make the comment if there is none."""
    if not job.event.get("pull_request"):
        return "no comment, because this job does not belong to a pull request"
    marker = f"<!-- ddpperf: {job.name} -->"
    head = f"{marker}\n{job.link}\n\n"
    body = {"body": head + shortened(result.page, MOST_CHARACTERS - len(head))}
    comments = f"issues/{job.event['pull_request']['number']}/comments"
    for comment in github.all_pages(comments):
        if (comment["body"] or "").startswith(marker):
            github.request("PATCH", f"issues/comments/{comment['id']}", body)
            return "updated the comment on the pull request"
    github.request("POST", comments, body)
    return "added a comment to the pull request"


def publish_pull_request(github: GitHub, job: Job, result: Result, branch: str) -> str:
    """Propose the baseline on a branch, unless the branch has an open pull request already."""
    proposal = {
        "title": "Store a new baseline",
        "head": branch,
        "base": job.event.get("repository", {}).get("default_branch") or job.branch,
        "body": f"{job.link}\n\n{shortened(result.page, MOST_CHARACTERS // 2)}",
    }
    owner = github.repository.partition("/")[0]
    if github.request("GET", f"pulls?state=open&head={owner}:{branch}"):
        return f"the open pull request of {branch} has the new baseline"
    made = github.request("POST", "pulls", proposal)
    return f"opened the pull request {made['html_url']}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="publish.py", description="Show the verdict of a run on GitHub.")
    parser.add_argument("what", choices=["check", "comment", "pull-request"])
    parser.add_argument("status", type=int, help="pytest's exit status")
    parser.add_argument("folder", type=Path, help="the output folder")
    parser.add_argument("--branch", default="", help="the branch of baselines, for pull-request")
    given = parser.parse_args()
    result = result_of(given.status, given.folder)
    if given.what == "check":
        print(annotation(result))
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(MOST_SECONDS)
    try:
        github = GitHub(
            url=os.environ.get("GITHUB_API_URL") or "https://api.github.com",
            repository=os.environ["GITHUB_REPOSITORY"],
            token=os.environ.get("GITHUB_TOKEN", ""),
        )
        job = Job.from_environment(os.environ)
        if given.what == "check":
            done = publish_check(github, job, result)
        elif given.what == "comment":
            done = publish_comment(github, job, result)
        else:
            done = publish_pull_request(github, job, result, given.branch)
        print(done)
    except Exception as error:  # an answer, a variable or the event's file may have any form
        why = str(error) if isinstance(error, NotPublished) else f"unexpected data: {error!r}"
        print(f"::warning title=ddpperf::no {given.what} was published: {' '.join(why.split())}")
    finally:
        signal.alarm(0)
    return 0


def _late(*_: object) -> None:
    raise NotPublished(f"GitHub took longer than {MOST_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
