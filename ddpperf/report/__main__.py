"""Make a page, pictures or tables from a stored run, without measuring anything.

    python -m ddpperf.report RUN.json [--baseline OTHER.json] [-o report.html] [--plots DIR] [--tables]

Without -o, --plots and --tables, the summary of the run is printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddpperf.command_output import print_lines
from ddpperf.errors import Refused, first_line
from ddpperf.report.page import require_replaceable, write_page
from ddpperf.report.plots import write_plots
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import summary_lines, verdict_lines
from ddpperf.results.outcomes import Outcome, OutcomeKind
from ddpperf.results.stored_runs import SCHEMA, NoBaseline, Storage, read_document
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.exit_status import decide
from ddpperf.verdict.stored_run_comparison import Controls, Reference, compare, negative_control
from ddpperf.verdict.thresholds import read_threshold_file


def load(path: Path) -> dict[str, Any]:
    """Return the document of a stored run; raise NoBaseline for any other file."""
    document: dict[str, Any] = read_document(path)
    header = document.get("ddpperf") if isinstance(document, dict) else None
    if not isinstance(header, dict):
        raise NoBaseline(f"{path} was not saved by ddpperf; name a file in .ddpperf/runs or perf/baselines")
    if (schema := header.get("schema")) != SCHEMA:
        raise NoBaseline(f"{path} has schema {schema!r}, this ddpperf reads {SCHEMA}; measure again")
    if not document.get("benchmarks"):
        raise NoBaseline(f"{path} holds no measured test; name another run")
    return document


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
    parser = argparse.ArgumentParser(
        prog="python -m ddpperf.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] RUN.json",
    )
    parser.add_argument("run", type=Path, help="a stored run, such as .ddpperf/runs/KEY/0001_x.json")
    parser.add_argument(
        "--baseline", type=Path, metavar="OTHER.json", help="a stored run; show times as ratios to its times"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write a page to this file")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write pictures to this folder")
    parser.add_argument("--tables", action="store_true", help="print Markdown tables for a written report")
    given = parser.parse_args()
    try:
        if given.output is not None:
            require_replaceable("-o", given.output)
        made = _made(given)
    except (NoBaseline, Refused) as problem:
        return _refused(str(problem))
    except ImportError as error:
        return _refused(f"a library cannot be imported ({first_line(error)}); install it with pip")
    except OSError as error:
        place = given.output or given.plots or error.filename
        return _refused(f"{place} cannot be written ({error.strerror}); name another file or folder")
    except Exception as error:  # whatever a damaged file makes of the code
        return _refused(f"{given.run} is damaged ({first_line(error)}); name another run")
    try:
        print_lines(made)
    except OSError as error:
        return _refused(f"the output cannot be written ({error.strerror}); make room, or name a file with -o")
    return 0


def _made(given: argparse.Namespace) -> list[str]:
    """Write the requested page and pictures, and return the lines to print."""
    document = load(given.run)
    if given.baseline is not None:
        document = compared(document, given.run, given.baseline, Path.cwd())
    kept = Storage(root=Path.cwd(), hardware_key=document["ddpperf"]["hardware_key"]).kept()
    lines = report_tables(document).splitlines() if given.tables else []
    if not given.tables and given.output is None and given.plots is None:
        lines = [*summary_lines(document), *verdict_lines(document["ddpperf"])]
    if given.output is not None:
        lines.append(f"saved {write_page(given.output, document, kept)}")
    if given.plots is not None:
        lines.append(f"saved {write_plots(given.plots, document, kept)}")
    return lines


def _refused(sentence: str) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)
    return 4


if __name__ == "__main__":
    sys.exit(main())
