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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused, first_line
from ddpperf.io.command import Parser, hour_price, print_lines, refused
from ddpperf.io.files import require_replaceable, write_atomically
from ddpperf.report.csv_files import CSV_BEGINS, CURVES_BEGINS, curves_csv, metrics_csv
from ddpperf.report.html_page import PAGE_BEGINS, page
from ddpperf.report.markdown_pages import RESULTS_BEGIN, results_page
from ddpperf.report.plots import write_plots
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import summary_lines, verdict_lines
from ddpperf.results.outcomes import Outcome, OutcomeKind, Reason
from ddpperf.results.stored_runs import NoBaseline, Storage, newest_run, read_document
from ddpperf.verdict.estimates import stored_estimates, stored_missing
from ddpperf.verdict.rows import rows
from ddpperf.verdict.thresholds import read_threshold_file
from ddpperf.verdict.verdict import Context, answer_of, decide

PATHS = (
    ("--baseline", "OTHER.json", "a stored run; show times as ratios to its times"),
    ("-o --output", "FILE.html", "write a page to this file; FILE.md for Markdown"),
    ("--plots", "DIR", "write pictures to this folder"),
    ("--csv", "FILE.csv", "write all metrics to this file as CSV"),
    ("--curves", "FILE.csv", "write losses and accuracies by epoch to this file"),
)


def compared(document: dict[str, Any], run: Path, with_run: Path, root: Path) -> dict[str, Any]:
    """Return a stored run's document, with its comparison with another stored run and a new verdict.

    Nothing is measured, so the verdict is never PASS. root: the project's root, whose
    perf/thresholds.toml has the settings of comparisons.
    """
    header = document["ddpperf"]
    storage = Storage(root=root, hardware_key=header["hardware_key"])
    now, then = storage.read(document, run), storage.load(with_run)
    _, by_hardware = read_threshold_file(root)
    settings = by_hardware["gpu" if header["options"].get("device") == "cuda" else "cpu"].comparing()
    estimates = stored_estimates(then.measured, now.measured, settings, then.metrics, now.metrics)
    found = rows(estimates, settings)
    nothing = Reason(
        "two stored runs were compared, and nothing was measured",
        f"check out the newer code, and compare: python -m pytest perf/ --benchmark-compare={with_run}",
    )
    missing = stored_missing(then.measured, now.measured, now.measured, with_run.name)
    context = Context(compared_with=with_run.name, missing=missing, problems=[nothing])
    outcomes = {
        test: Outcome(kind=OutcomeKind(outcome["kind"]), reason=outcome["reason"])
        for test, outcome in header["outcomes"].items()
    }
    verdict = decide(outcomes, measured=now.measured, answer=answer_of(found, estimates, context))
    new = sorted(now.measured.keys() - then.measured.keys())
    judged = {"rows": [row.to_json() for row in found], "new": new, "drifts": {}}
    fields = {"judged": judged, "compared_with": with_run.name, "verdict": asdict(verdict)}
    return document | {"ddpperf": header | fields}


def main() -> int:
    parser = Parser("ddpperf.report", __doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a stored run; the newest by default")
    for option, metavar, what in PATHS:
        parser.add_argument(*option.split(), type=Path, metavar=metavar, help=what)
    parser.add_argument("--tables", action="store_true", help="print Markdown tables for a written report")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all tests of a comparison")
    price = "price of an hour of one device, in any currency; replaces the price of the run"
    parser.add_argument("--gpu-hour-price", type=hour_price, metavar="PRICE", help=price)
    given = parser.parse_args()
    try:
        given.run = given.run or newest_run(Path.cwd())
        print_lines(_made(given))
    except (NoBaseline, Refused) as problem:
        return refused(problem)
    except OSError as error:
        return refused(f"the output cannot be written ({error}); name another file or folder")
    except Exception as error:  # whatever a damaged file, or a damaged library, makes of the code
        return refused(f"{given.run} cannot be shown ({first_line(error)}); name another run")
    return 0


def _made(given: argparse.Namespace) -> list[str]:
    """Write the requested files, and return the lines to print."""
    document = read_document(given.run)
    header = document["ddpperf"]
    if not document.get("benchmarks"):
        raise NoBaseline(f"{given.run} holds no measured test; name another run")
    if given.baseline is not None:
        document = compared(document, given.run, given.baseline, Path.cwd())
    if given.gpu_hour_price is not None:
        header["options"]["gpu_hour_price"] = given.gpu_hour_price
    lines = report_tables(document).splitlines() if given.tables else []

    def save(option: str, path: Path | None, begins: bytes, what: str, text: Callable[[], str]) -> None:
        if path is not None:
            require_replaceable(option, str(path), begins, what)
            lines.append(f"saved {write_atomically(path, text())}")

    if given.output is not None and given.output.suffix == ".md":
        save("-o", given.output, RESULTS_BEGIN.encode(), "pages", lambda: results_page(document))
    else:
        save("-o", given.output, PAGE_BEGINS, "pages", lambda: page(document, Path.cwd()))
    save("--csv", given.csv, CSV_BEGINS, "exports", lambda: metrics_csv(document))
    save("--curves", given.curves, CURVES_BEGINS, "exports", lambda: curves_csv(document))
    if given.plots is not None:
        lines.append(f"saved {write_plots(given.plots, document)}")
    summary = summary_lines(document, verbose=given.verbose)
    return lines or [*summary, *verdict_lines(document["ddpperf"], verbose=given.verbose)]


if __name__ == "__main__":
    sys.exit(main())
