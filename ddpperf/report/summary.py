"""The summary of a test run as text, with a table, warnings and the verdict, and as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from statistics import median
from typing import Any

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr, spread_over_ranks
from ddpperf.report.ab_table import ab_lines, every_metric, two_sides
from ddpperf.report.text import aligned, format_metric, grouped, short
from ddpperf.report.warnings import warnings_of
from ddpperf.results import units
from ddpperf.results.metrics import find
from ddpperf.results.notes import NoteKind
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.samples import Measured
from ddpperf.verdict.run_history import DRIFT_RUNS
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from ddpperf.verdict.thresholds import BoundKind

PAGE_BEGINS = "## ddpperf: "
MOST_NAMED = 3  # tests that one line names


def summary_lines(document: Mapping[str, Any], comparison: Comparison | None = None) -> list[str]:
    """Return the table and the verdict of a stored run as lines of plain text."""
    header = document["ddpperf"]
    stored = {found["fullname"]: found["extra_info"]["ddpperf"] for found in document["benchmarks"]}
    warnings = {test: warnings_of(found) for test, found in stored.items()}
    notes = {
        test: [note["text"] for note in found["notes"] if note["kind"] == NoteKind.INFO]
        for test, found in stored.items()
    }
    skipped = {
        test: [outcome["reason"]]
        for test, outcome in header["outcomes"].items()
        if OutcomeKind(outcome["kind"]).skipped
    }
    lines = [_title(header, stored), ""]
    if comparison is not None or two_sides(header) is None:
        rows = _table(header, stored, warnings, comparison)
        lines += [*aligned(rows, range(1, len(rows[0]) - 2)), ""]
    lines += _compared(comparison) if comparison is not None else []
    lines += ab_lines(header, warnings, only_judged=comparison is not None)
    lines += grouped(warnings, "warning: ") + grouped(notes) + grouped(skipped, "skipped: ")
    lines += [*_left_out(header.get("left_out", {})), _thresholds(header), *_timing(header.get("timing"))]
    status = header["verdict"]["status"]
    first, *others = header["verdict"]["reasons"]
    return [*lines, f"{status}: {first}", *(f"{' ' * len(status)}  {reason}" for reason in others)]


def _title(header: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    environment = header["environment"]
    data = header["options"].get("data", {"name": "synthetic"})
    parts = [
        f"ddpperf on {header['hardware_key']}",
        f"torch {environment['torch']}" if "torch" in environment and "against" not in header else "",
        " ".join(str(part) for part in (environment.get("backend"), environment.get("nccl")) if part),
        "not pinned" if environment.get("gpus") and isinstance(environment.get("pinning"), str) else "",
        "NVLS off" if environment.get("nvls") == "0" else "",
        f"commit {environment['commit']}" if environment["commit"] != "nogit" else "",
        f"{data['name']} images" if data["name"] != "synthetic" else "",
        units.counted(header["options"]["rounds"], "round"),
        units.counted(_most_sets(stored), "process set"),
    ]
    return ", ".join(part for part in parts if part)


def _most_sets(stored: Mapping[str, Any]) -> int:
    return max((len(found["samples"]) for found in stored.values()), default=0)


def _table(
    header: Mapping[str, Any],
    stored: Mapping[str, Any],
    warnings: Mapping[str, list[str]],
    comparison: Comparison | None,
) -> list[tuple[str, ...]]:
    compared = ("ratio", "limit") if comparison is not None else ()
    sets = ("sets",) if _most_sets(stored) > 1 else ()
    rows: list[tuple[str, ...]] = [
        ("test", "time", "IQR", "ranks", *sets, *compared, "overhead", "outcome", "metrics")
    ]
    overhead = header.get("timing", {}).get("overhead_seconds", {})
    for test, outcome in header["outcomes"].items():
        measured = Measured.from_json(stored[test]) if test in stored else None
        change = comparison.changes.get(test) if comparison is not None else None
        metrics = stored[test]["metrics"].items() if test in stored else ()
        row = (
            short(test),
            *_time(measured),
            *(_spread_over_sets(measured),) * len(sets),
            *(_ratio(change) if change is not None else ("-",) * len(compared)),
            f"{overhead[test]:.1f} s" if test in overhead else "-",
            outcome["kind"] + (" !" if warnings.get(test) else ""),
            ", ".join(format_metric(name, metric["value"], metric["unit"]) for name, metric in metrics),
        )
        rows.append(row)
    return rows


def _time(measured: Measured | None) -> tuple[str, str, str]:
    """Return a test's median step time, its IQR over rounds, and its spread over ranks, as text."""
    if measured is None:
        return "-", "-", "-"
    rounds = [measured.step_seconds(sample) for sample in measured.samples]
    iqr = f"{median(map(relative_iqr, rounds)):.1%}" if min(map(len, rounds)) >= FEWEST_ROUNDS else "-"
    world_size = measured.spec.world_size  # other ranks of the set worked alone
    together = [[ranks[:world_size] for ranks in sample.seconds] for sample in measured.samples]
    spreads = [spread for rounds in together if (spread := spread_over_ranks(rounds)) is not None]
    seconds = median(measured.median_step_seconds().values())
    return units.seconds(seconds), iqr, f"{median(spreads):.1%}" if spreads else "-"


def _spread_over_sets(measured: Measured | None) -> str:
    """Return the slowest minus the fastest process set's step time, in percent of the median."""
    seconds = list(measured.median_step_seconds().values()) if measured is not None else []
    return f"{(max(seconds) - min(seconds)) / median(seconds):.1%}" if len(seconds) > 1 else "-"


def _ratio(change: Change) -> tuple[str, str]:
    if not change.judged:
        return f"{change.ratio:.3f} info", "-"
    mark = " cpu" if change.quantity == "CPU seconds" else " suspect" if change.suspect else ""
    return f"{change.ratio:.3f}{mark}", f"{change.limit:.4g}"


def _compared(comparison: Comparison) -> list[str]:
    lines = [
        f"ratio: step time over that in {comparison.baseline}; above its limit the test is measured again, "
        "beside the stored run's code"
    ]
    if any(not change.judged for change in comparison.changes.values()):
        lines.append("ratio with info: too noisy on this machine to fail a run")
    if comparison.new:
        lines.append(f"new, so compared with nothing: {', '.join(map(short, comparison.new))}")
    if any(change.quantity == "CPU seconds" for change in comparison.changes.values()):
        lines.append("ratio with cpu: CPU seconds, because the step waits for the CPU")
    if (shift := comparison.median_shift()) is not None:
        timed = sum(change.quantity == "step" for change in comparison.changes.values())
        by = f"{abs(math.expm1(shift)):.1%} {'longer' if shift > 0 else 'shorter'}"
        lines.append(f"median shift of {units.counted(timed, 'time')}: {by} than in {comparison.baseline}")
    if controls := comparison.controls.measured():
        ratios = (
            f"{name} {change.ratio:.3f} (limit {change.limit:.4g})" for name, change in controls.items()
        )
        lines.append(f"controls: {', '.join(ratios)}")
    if suspects := comparison.looks_slower:
        named = _largest({test: change.ratio - 1 for test, change in suspects.items()})
        lines.append(f"{units.counted(len(suspects), 'test')} slower or suspected, such as {named}")
    if drifts := comparison.drifts:
        slower = {test: math.expm1(change) for test, change in drifts.items() if change > 0}
        found = f"{units.counted(len(slower), 'test')} slower, such as {_largest(slower)}"
        lines.append(
            f"slow drift from the first {DRIFT_RUNS} baselines to the last {DRIFT_RUNS} runs: "
            f"{found if slower else 'no test slower'}, of {len(drifts)}"
        )
    return lines


def _largest(slowdowns: Mapping[str, float]) -> str:
    tests = sorted(slowdowns, key=lambda test: -slowdowns[test])[:MOST_NAMED]
    return ", ".join(f"{short(test)} ({slowdowns[test]:+.1%})" for test in tests)


def _left_out(by_file: Mapping[str, int]) -> list[str]:
    """Return a line with the number of tests outside the core suite that were not run.

    by_file: the number of these tests in each file. Few files are named.
    """
    if not by_file:
        return []
    named = ", ".join(f"{PurePosixPath(path).stem} {count}" for path, count in by_file.items())
    of = f" ({named})" if len(by_file) <= MOST_NAMED else ""
    return [
        f"left out {units.counted(sum(by_file.values()), 'test')} of the full suite{of}; --full runs them"
    ]


def _thresholds(header: Mapping[str, Any]) -> str:
    """Return a line with the number of bounds that hold, and the metric that came nearest to its
    bound.

    Exact metrics, such as bytes, equal their bounds and come near to nothing.
    """
    thresholds = header.get("thresholds", {"known": 0})
    if not thresholds["known"]:
        return f"thresholds: none for {header['hardware_key']}"
    known = f"{thresholds['known']} for {header['hardware_key']}"
    if "checks" not in thresholds:  # an older run, which stored only counts
        return f"thresholds: {thresholds['applied']} of {known} applied"
    checks = thresholds["checks"]
    if not checks:
        return f"thresholds: none of {known} applied"
    missed = [check for check in checks if not check["held"]]
    line = f"thresholds: {len(checks) - len(missed)} hold" + f", {len(missed)} missed" * bool(missed)
    inexact = [check for check in checks if check["kind"] != BoundKind.EXACT and check["value"] is not None]
    if not inexact:
        return line
    nearest = min(inexact, key=_distance)
    metric = find(nearest["metric"])
    value, bound = metric.text(nearest["value"]), f"{nearest['kind']} {metric.format(nearest['bound'])}"
    return f"{line}; nearest: {short(nearest['test'])} {value}, {bound}"


def _distance(check: Mapping[str, Any]) -> float:
    """Return how far a metric is on the good side of its bound, as a fraction of the bound."""
    distance = float(check["value"] / check["bound"] - 1)
    return distance if check["kind"] == BoundKind.FLOOR else -distance


def _timing(timing: Mapping[str, Any] | None) -> list[str]:
    if timing is None or not timing["overhead_seconds"]:
        return []
    total, counted = timing["seconds"], timing["counted_seconds"]
    overhead = median(timing["overhead_seconds"].values())
    timed = f"took {total:.0f} s, {counted / total:.0%} in timed rounds"
    return [f"{timed}; median overhead {overhead:.1f} s per test"]


# --- Markdown


def markdown(document: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return a Markdown page with the verdict and its reasons, and foldable tables below."""
    header = document["ddpperf"]
    ab = two_sides(header)
    folded = {"all tests": lines} | ({"all metrics": every_metric(ab)} if ab is not None else {})
    page = [f"{PAGE_BEGINS}{header['verdict']['status']}", "", *_fenced(header["verdict"]["reasons"]), ""]
    for title, hidden in folded.items():
        page += [f"<details><summary>{title}</summary>", "", *_fenced(hidden), "", "</details>", ""]
    return "\n".join(page)


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return a Markdown code block, whose fence has more backticks than any line."""
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence]
