"""A local HTTP server that answers like GitHub's API for checks, comments and pull requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPOSITORY_NAME = "team/ddpperf"
TOKEN = "secret"  # may write
READ_TOKEN = "read"  # as a fork's token
CONCLUSIONS = ("success", "failure", "neutral")


def job_variables(url: str) -> dict[str, str]:
    """Return the environment variables of a job of GitHub Actions. url: the address of the API."""
    return {
        "GITHUB_API_URL": url,
        "GITHUB_JOB": "nightly",
        "GITHUB_REF_NAME": "main",
        "GITHUB_REPOSITORY": REPOSITORY_NAME,
        "GITHUB_RUN_ID": "7",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_SHA": "b" * 40,
        "GITHUB_TOKEN": TOKEN,
        "GITHUB_WORKFLOW": "nightly",
    }


class GitHubApi:
    """What the server holds, and the requests that it got, as "METHOD path"."""

    def __init__(self) -> None:
        self.url = ""
        self.comments: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.pulls: list[dict[str, Any]] = []
        self.requests: list[str] = []

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any, str]:
        """Return the status, the JSON and the Link header of the answer, or Location for a redirect."""
        self.requests.append(f"{method} {path.partition('?')[0]}")
        if token not in (TOKEN, READ_TOKEN):
            return 401, {"message": "Bad credentials"}, ""
        if not (found := re.fullmatch(rf"/repos/{REPOSITORY_NAME}/([^?]+)\??(.*)", path)):
            return 404, {"message": "Not Found"}, ""
        if method != "GET" and token == READ_TOKEN:
            return 403, {"message": "Resource not accessible by integration"}, ""
        what, query = found[1], dict(pair.split("=", 1) for pair in found[2].split("&") if pair)
        match method, what.split("/"):
            case "POST", ["check-runs"]:
                return self._add_check(body)
            case "GET", ["issues", number, "comments"]:
                return self._list_comments(int(number), query)
            case "POST", ["issues", number, "comments"]:
                return self._write_comment({"id": len(self.comments) + 1, "issue": int(number)}, body, 201)
            case "PATCH", ["issues", "comments", number]:
                comments = [comment for comment in self.comments if comment["id"] == int(number)]
                if comments:
                    return self._write_comment(comments[0], body, 200)
            case "GET", ["pulls"]:
                return 200, [pull for pull in self.pulls if f"team:{pull['head']}" == query["head"]], ""
            case "POST", ["pulls"]:
                return self._add_pull(body)
        return 404, {"message": "Not Found"}, ""

    def _add_check(self, body: Any) -> tuple[int, Any, str]:
        if body["conclusion"] not in CONCLUSIONS or len(body["output"]["summary"]) > 65_535:
            return _invalid("the check is not valid")
        self.checks.append(body)
        return 201, {"id": len(self.checks)}, ""

    def _list_comments(self, issue: int, query: dict[str, str]) -> tuple[int, Any, str]:
        size, page = int(query.get("per_page", 30)), int(query.get("page", 1))
        found = [comment for comment in self.comments if comment["issue"] == issue]
        more = len(found) > page * size
        following = (
            f"{self.url}/repos/{REPOSITORY_NAME}/issues/{issue}/comments?per_page={size}&page={page + 1}"
        )
        return 200, found[(page - 1) * size : page * size], f'<{following}>; rel="next"' if more else ""

    def _write_comment(self, comment: dict[str, Any], body: Any, status: int) -> tuple[int, Any, str]:
        if len(body["body"]) > 65_536:
            return _invalid("body is too long (maximum is 65536 characters)")
        if comment not in self.comments:
            self.comments.append(comment)
        comment["body"] = body["body"]
        return status, comment, ""

    def _add_pull(self, body: Any) -> tuple[int, Any, str]:
        if any(pull["head"] == body["head"] for pull in self.pulls):
            return _invalid(f"A pull request already exists for team:{body['head']}.")
        made = body | {"html_url": f"https://github.com/{REPOSITORY_NAME}/pull/{len(self.pulls) + 1}"}
        self.pulls.append(made)
        return 201, made, ""


def _invalid(message: str) -> tuple[int, Any, str]:
    return 422, {"message": "Validation Failed", "errors": [{"message": message}]}, ""


@contextmanager
def running_api() -> Iterator[GitHubApi]:
    """Start the server on a free port of 127.0.0.1, until the block ends."""
    api = GitHubApi()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, answer, link = api.answer(self.command, self.path, token, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if link:
                self.send_header("Location" if 300 <= status < 400 else "Link", link)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
