"""Text files are written in UTF-8, whatever the locale is."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project import REPOSITORY

WRITING = {"w", "a", "x", "r+"}


def unencoded(source: str) -> list[int]:
    """Return the lines of calls that write text in the encoding of the locale."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        modes = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
        writes = name == "write_text" or (name in ("open", "fdopen") and modes & WRITING)
        if writes and not {"encoding", "errors"} & {keyword.arg for keyword in call.keywords}:
            found.append(call.lineno)
    return found


def test_no_text_depends_on_the_locale() -> None:
    files = [path for folder in ("ddpperf", "perf") for path in Path(REPOSITORY, folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(REPOSITORY)): unencoded(path.read_text("utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}
