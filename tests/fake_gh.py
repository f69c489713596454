"""The command `gh` for tests: it refuses what GitHub and the real command refuse.

Tests put a link to this file on PATH. The file FAKE_GH holds what GitHub holds, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY_NAME = "team/ddpperf"
TOKEN = "secret"  # may write
READ_TOKEN = "read"  # as a fork's token
CONCLUSIONS = ("success", "failure", "neutral")
OF_MARKER = ".[] | select(.body | startswith(env.MARKER)) | .id"  # the only filter that this command knows

Held = dict[str, list[dict[str, Any]]]


def install(folder: Path) -> dict[str, str]:
    """Put the command into a new folder; return the variables of a job of GitHub Actions that uses it."""
    folder.mkdir()
    command = folder / "gh"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    command.chmod(0o755)
    return {
        "FAKE_GH": str(folder / "held.json"),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "GITHUB_JOB": "gate",
        "GITHUB_REPOSITORY": REPOSITORY_NAME,
        "GITHUB_RUN_ID": "7",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_WORKFLOW": "merge gate",
    }


def held(variables: dict[str, str]) -> Held:
    path = Path(variables["FAKE_GH"])
    return json.loads(path.read_text()) if path.exists() else {"comments": [], "checks": []}


def fail(message: str, status: int = 1) -> None:
    print(f"gh: {message}", file=sys.stderr)
    sys.exit(status)


def answer(github: Held, method: str, path: str, fields: dict[str, str]) -> Any:
    """Do what a request asks for; end the command with the message of a refusal."""
    if method != "GET" and os.environ["GH_TOKEN"] == READ_TOKEN:
        fail("Resource not accessible by integration (HTTP 403)")
    found = re.fullmatch(rf"repos/{REPOSITORY_NAME}/([^?]+)(\?per_page=100)?", path)
    match method, found[1].split("/") if found else []:
        case "POST", ["check-runs"]:
            if fields["conclusion"] not in CONCLUSIONS or len(fields["output[summary]"]) > 65_535:
                fail("Validation Failed (HTTP 422)")
            github["checks"].append(fields)
        case "GET", ["issues", number, "comments"]:
            return [comment for comment in github["comments"] if comment["issue"] == int(number)]
        case "POST", ["issues", number, "comments"]:
            github["comments"].append({"id": len(github["comments"]) + 1, "issue": int(number)})
            return write(github["comments"][-1], fields)
        case "PATCH", ["issues", "comments", number]:
            return write(github["comments"][int(number) - 1], fields)
        case _:
            fail("Not Found (HTTP 404)")
    return fields


def write(comment: dict[str, Any], fields: dict[str, str]) -> None:
    if len(fields["body"]) > 65_536:
        fail("Validation Failed: body is too long (maximum is 65536 characters) (HTTP 422)")
    comment["body"] = fields["body"]


def main() -> None:
    token = os.environ.get("GH_TOKEN")
    if not token:
        fail("To use GitHub CLI in a GitHub Actions workflow, set the GH_TOKEN environment variable.", 4)
    if token not in (TOKEN, READ_TOKEN):
        fail("Bad credentials (HTTP 401)")
    if sys.argv[1:4] == ["auth", "git-credential", "get"]:
        print(f"username=x-access-token\npassword={token}")
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["api"])
    parser.add_argument("path")
    parser.add_argument("--paginate", action="store_true")
    parser.add_argument("--method")
    parser.add_argument("--jq", choices=[OF_MARKER])
    parser.add_argument("-f", dest="texts", action="append", default=[])
    parser.add_argument("-F", dest="files", action="append", default=[])
    given = parser.parse_args()
    fields = dict(field.split("=", 1) for field in given.texts)
    for field in given.files:
        name, _, file = field.partition("=@")
        fields[name] = Path(file).read_text()
    github = held(dict(os.environ))
    found = answer(github, given.method or ("POST" if fields else "GET"), given.path, fields)
    Path(os.environ["FAKE_GH"]).write_text(json.dumps(github))
    for comment in found if given.jq else ():
        if comment["body"].startswith(os.environ["MARKER"]):
            print(comment["id"])


if __name__ == "__main__":
    main()
