"""Checks of the output files and folders that the command line names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.report.markdown import VERDICT_BEGINS
from ddpperf.report.page import PAGE_BEGINS
from ddpperf.results.stored_runs import require_replaceable


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of a run besides its stored JSON, as the command line requests them.

    verdict, page: files, or None. tables: whether to print the tables of a report.
    """

    verdict: Path | None
    page: Path | None
    tables: bool


def requested_outputs(config: pytest.Config) -> Outputs:
    """Return the requested outputs, and delete an earlier run's verdict in the file of --verdict.

    Raises Refused if one of them cannot be written.
    """
    report = config.getoption("report")
    page = file_to_write("--report", report) if report is not None else None
    if page is not None:
        require_replaceable("--report", report, PAGE_BEGINS, "pages")
        if config.getoption("verdict") and page == Path(config.getoption("verdict")).resolve():
            raise Refused(f"--report and --verdict name the same file {report!r}; name two files")
    return Outputs(
        verdict=verdict_file(config.getoption("verdict")),
        page=page,
        tables=bool(config.getoption("tables")),
    )


def verdict_file(text: str | None) -> Path | None:
    """Return the path that --verdict names, and delete an earlier run's verdict in that file.

    Raises Refused if the file cannot be written.
    """
    if text is None:
        return None
    path = file_to_write("--verdict", text)
    require_replaceable("--verdict", text, VERDICT_BEGINS.encode(), "verdicts")
    path.unlink(missing_ok=True)
    return path


def file_to_write(option: str, text: str) -> Path:
    """Return the absolute path of an option's output file.

    Raises Refused if the file cannot be written.
    """
    path = Path(text).resolve()
    if not text or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise Refused(f"{option} takes a file in a writable folder, got {text!r}; name another file")
    return path


def make_folder(option: str, path: Path | None) -> None:
    """Create the output folder that an option names.

    Raises Refused if the folder cannot be created or written.
    """
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{option} cannot make {path} ({error.strerror}); name another folder") from error
    if not os.access(path, os.W_OK):
        raise Refused(f"{option} takes a writable folder, got {path}; name another folder")
