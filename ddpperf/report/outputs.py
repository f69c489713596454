"""Write the page and the pictures of a run completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpperf.results.stored_runs import write_atomically

History = Sequence[tuple[str, Mapping[str, float]]]  # name and step seconds by test, oldest first


def write_page(path: Path, document: Mapping[str, Any], history: History = ()) -> Path:
    """Write the HTML page of a stored run; raise OSError if the file cannot be written."""
    from ddpperf.report.page import page  # imports matplotlib and jinja2, which take 0.5 s

    return write_atomically(path, page(document, history))


def write_plots(folder: Path, document: Mapping[str, Any], history: History = ()) -> Path:
    """Write each picture of a stored run as PNG and SVG to a folder, and return the folder."""
    from ddpperf.report.cases import cases_of
    from ddpperf.report.plots import pictures_of, save

    save(pictures_of(cases_of(document), document["ddpperf"], history), folder)
    return folder
