"""The command `gh` for tests: it refuses what GitHub and the real command refuse.

Tests put a link to this file on PATH. The file FAKE_GH holds what GitHub holds, as JSON.
"""

from __future__ import annotations

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
    """Return the comments and the checks that GitHub holds."""
    path = Path(variables["FAKE_GH"])
    return json.loads(path.read_text()) if path.exists() else {"comments": [], "checks": []}


def fail(message: str, status: int = 1) -> None:
    print(f"gh: {message}", file=sys.stderr)
    sys.exit(status)


def parsed(arguments: list[str]) -> tuple[str, str, dict[str, str], str]:
    """Return the method, the path, the fields and the filter of `gh api`."""
    method, path, fields, shown = "", "", {}, ""
    words = iter(arguments)
    for word in words:
        match word:
            case "--paginate":
                pass
            case "--method":
                method = next(words)
            case "--jq":
                shown = next(words)
            case "-f" | "-F":
                name, _, value = next(words).partition("=")
                of_file = word == "-F" and value.startswith("@")
                fields[name] = Path(value[1:]).read_text() if of_file else value
            case _ if word.startswith("-") or path:
                fail(f"unknown argument: {word}")
            case _:
                path = word
    return method or ("POST" if fields else "GET"), path, fields, shown


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
    if not os.environ.get("GH_TOKEN"):
        fail("To use GitHub CLI in a GitHub Actions workflow, set the GH_TOKEN environment variable.", 4)
    if os.environ["GH_TOKEN"] not in (TOKEN, READ_TOKEN):
        fail("Bad credentials (HTTP 401)")
    if sys.argv[1:4] == ["auth", "git-credential", "get"]:
        print(f"username=x-access-token\npassword={os.environ['GH_TOKEN']}")
        return
    if sys.argv[1] != "api":
        fail(f'unknown command "{sys.argv[1]}" for "gh"')
    method, path, fields, shown = parsed(sys.argv[2:])
    github = held(dict(os.environ))
    found = answer(github, method, path, fields)
    Path(os.environ["FAKE_GH"]).write_text(json.dumps(github))
    if shown == OF_MARKER:
        for comment in found:
            if comment["body"].startswith(os.environ["MARKER"]):
                print(comment["id"])
    elif shown:
        fail(f"failed to parse jq expression: {shown}")


if __name__ == "__main__":
    main()
