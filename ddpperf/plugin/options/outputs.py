"""Checks of the output files and folders that the command line names."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.report.markdown import PAGE_BEGINS


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of a run besides its stored JSON, as the command line requests them.

    verdict, page: files, or None. plots: a folder, or None. tables: whether to print the tables of a
    report.
    """

    verdict: Path | None = None
    page: Path | None = None
    plots: Path | None = None
    tables: bool = False


def requested_outputs(config: pytest.Config) -> Outputs:
    """Return the requested outputs, and delete an earlier run's verdict in the file of --verdict.

    Raises Refused if one of them cannot be written.
    """
    page, plots = config.getoption("report"), config.getoption("plots")
    for option, value in (("--report", page), ("--plots", plots)):
        if value is not None and importlib.util.find_spec("matplotlib") is None:
            raise Refused(f"{option} needs matplotlib, which is not installed; pip install matplotlib")
    folder = Path(plots).resolve() if plots is not None else None
    make_folder("--plots", folder)
    return Outputs(
        verdict=verdict_file(config.getoption("verdict")),
        page=file_to_write("--report", page) if page is not None else None,
        plots=folder,
        tables=bool(config.getoption("tables")),
    )


def verdict_file(text: str | None) -> Path | None:
    """Return the path that --verdict names, and delete an earlier run's verdict in that file.

    Raises Refused if the file cannot be written.
    """
    if text is None:
        return None
    path = file_to_write("--verdict", text)
    if path.exists() and not _is_page(path):
        raise Refused(f"--verdict replaces earlier verdicts only, got {text!r}; name another file")
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


def _is_page(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(len(PAGE_BEGINS))
    except OSError:
        return False
    return start in (b"", PAGE_BEGINS.encode())
