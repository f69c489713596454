"""Make a page, pictures, tables or exports from a stored run, without measuring anything.

    python -m ddpperf.report [RUN.json] [--baseline OTHER.json] [-o report.html] [--plots DIR] [--tables]
                             [--gpu-hour-price PRICE] [--csv FILE] [--curves FILE]

Without RUN.json, the newest run of this project is used. Without another option, the summary of the
run is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused, first_line
from ddpperf.io.command import Parser, hour_price, print_lines, refused
from ddpperf.report.exports import CSV_BEGINS, CURVES_BEGINS, write_csv, write_curves
from ddpperf.report.markdown import RESULTS_BEGIN, write_results
from ddpperf.report.page import PAGE_BEGINS, write_page
from ddpperf.report.plots import write_plots
from ddpperf.report.plots.over_time import History
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import summary_lines, verdict_lines
from ddpperf.results.outcomes import Outcome, OutcomeKind
from ddpperf.results.stored_runs import (
    NoBaseline,
    Storage,
    header_of,
    newest_run,
    read_document,
    require_replaceable,
)
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.exit_status import decide
from ddpperf.verdict.stored_run_comparison import Controls, Reference, compare, negative_control
from ddpperf.verdict.thresholds import read_threshold_file

PATHS = (
    ("--baseline", "OTHER.json", "a stored run; show times as ratios to its times"),
    ("-o --output", "FILE.html", "write a page to this file; FILE.md for Markdown"),
    ("--plots", "DIR", "write pictures to this folder"),
    ("--csv", "FILE.csv", "write all metrics to this file as CSV"),
    ("--curves", "FILE.csv", "write losses and accuracies by epoch to this file"),
)


def compared(document: dict[str, Any], run: Path, with_run: Path, root: Path) -> dict[str, Any]:
    """Return a stored run's document, with its comparison with another stored run and a new verdict.

    Nothing is measured, so only slow-downs above the limits of the stored times are found. root: the
    project's root, whose perf/thresholds.toml has the settings of comparisons.
    """
    header = document["ddpperf"]
    storage = Storage(root=root, hardware_key=header["hardware_key"])
    now, then = storage.read(document, run), storage.load(with_run)
    device = header["options"].get("device", "cpu")
    _, settings = read_threshold_file(root)
    reference = Reference(
        baseline=then,
        settings=settings["gpu" if device == "cuda" else "cpu"],
        device=device,
        history=storage.history(then),
    )
    found = compare(now.measured, reference, list(now.measured))
    copies = negative_control(now.copied, reference, compared=len(found.changes))
    found = replace(found, controls=Controls(negative=copies))
    answer = answer_of(found, None, no_stored_code="two stored runs were compared, and nothing was measured")
    outcomes = {
        test: Outcome(kind=OutcomeKind(outcome["kind"]), reason=outcome["reason"])
        for test, outcome in header["outcomes"].items()
    }
    verdict = decide(outcomes, measured=now.measured, answer=answer)
    fields = {"comparison": found.to_json(), "compared_with": with_run.name, "verdict": asdict(verdict)}
    return document | {"ddpperf": header | fields | {"confirmed": None}}


def main() -> int:
    parser = Parser("ddpperf.report", __doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a stored run; the newest by default")
    for option, metavar, what in PATHS:
        parser.add_argument(*option.split(), type=Path, metavar=metavar, help=what)
    parser.add_argument("--tables", action="store_true", help="print Markdown tables for a written report")
    price = "price of an hour of one device, in any currency; replaces the price of the run"
    parser.add_argument("--gpu-hour-price", type=hour_price, metavar="PRICE", help=price)
    given = parser.parse_args()
    try:
        given.run = given.run or newest_run(Path.cwd())
        made = _made(given)
    except (NoBaseline, Refused) as problem:
        return refused(problem)
    except ImportError as error:
        return refused(f"a library cannot be imported ({first_line(error)}); install it with pip")
    except Exception as error:  # whatever a damaged file makes of the code
        return refused(f"{given.run} is damaged ({first_line(error)}); name another run")
    try:
        print_lines(made)
    except OSError as error:
        return refused(f"the output cannot be written ({error.strerror}); make room, or name a file with -o")
    return 0


Write = Callable[[Path, dict[str, Any], History], Path]  # writes a stored run to a file or folder


def _requested(given: argparse.Namespace) -> list[tuple[Path, Write]]:
    """Return the requested files; raise Refused if one of them would replace something else."""
    page: tuple[bytes, str, Write] = (PAGE_BEGINS, "pages", write_page)
    if given.output is not None and given.output.suffix == ".md":
        page = (RESULTS_BEGIN.encode(), "pages", write_results)
    outputs = (
        ("-o", given.output, *page),
        ("--csv", given.csv, CSV_BEGINS, "exports", write_csv),
        ("--curves", given.curves, CURVES_BEGINS, "exports", write_curves),
    )
    if given.gpu_hour_price is not None and not (given.tables or given.output):
        raise Refused("--gpu-hour-price adds costs to --tables and to the page of -o, got neither; add one")
    found: list[tuple[Path, Write]] = [(given.plots, write_plots)] if given.plots is not None else []
    for option, path, begins, what, write in outputs:
        if path is not None:
            require_replaceable(option, str(path), begins, what)
            if path.resolve() in [other.resolve() for other, _ in found]:
                raise Refused(f"{option} names {path}, as another option does; name two files")
            found.append((path, write))
    return found


def _made(given: argparse.Namespace) -> list[str]:
    """Write the requested files, and return the lines to print."""
    outputs, document = _requested(given), read_document(given.run)
    header = header_of(document, given.run)
    if not document.get("benchmarks"):
        raise NoBaseline(f"{given.run} holds no measured test; name another run")
    if given.baseline is not None:
        document = compared(document, given.run, given.baseline, Path.cwd())
    if given.gpu_hour_price is not None:
        header["options"]["gpu_hour_price"] = given.gpu_hour_price
    kept = Storage(root=Path.cwd(), hardware_key=header["hardware_key"]).kept() if outputs else []
    lines = report_tables(document).splitlines() if given.tables else []
    if not (given.tables or outputs):
        lines = [*summary_lines(document), *verdict_lines(document["ddpperf"])]
    for path, write in outputs:
        try:
            lines.append(f"saved {write(path, document, kept)}")
        except OSError as error:
            advice = "name another file or folder"
            raise Refused(f"{path} cannot be written ({error.strerror}); {advice}") from error
    return lines


if __name__ == "__main__":
    sys.exit(main())
