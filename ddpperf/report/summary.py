"""A run as one table, then the verdict with its reasons: printed at the end of a run, or later from its JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpperf.analysis.statistics import FEWEST_ROUNDS, drift, relative_iqr, spread_over_ranks
from ddpperf.report.ab import against_lines, every_metric, two_sides
from ddpperf.report.format import aligned, format_metric, short
from ddpperf.results import units
from ddpperf.results.notes import NoteKind
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.samples import Measured
from ddpperf.verdict.run_history import DRIFT_RUNS
from ddpperf.verdict.stored_run import Change, Comparison

PAGE_BEGINS = "## ddpperf: "
WARNING = "warning: "
NOISY_IQR = 0.25
NAMED = 3  # of several tests
SPREAD = f"spread by more than {NOISY_IQR:.0%} (IQR)"
SLOWEST_COUNTS = "one_device"  # the leg that is the slowest device's time
DOUBTFUL_DEVICES = 0.10  # equal devices that do the same work alone differ by 1 %
CHANGED_PACE = 0.985  # of a captured step's time by itself: back to back it takes no less, within 0.5 %


def summary_lines(document: Mapping[str, Any], comparison: Comparison | None = None) -> list[str]:
    """The table and the verdict of a stored run, as lines without markup."""
    header = document["ddpperf"]
    stored = {
        benchmark["fullname"]: benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]
    }
    warnings = {test: warnings_of(each) for test, each in stored.items()}
    lines = [_title(header, stored), ""]
    if comparison is not None or two_sides(header) is None:
        rows = _table(header, stored, warnings, comparison)
        lines += [*aligned(rows, range(1, len(rows[0]) - 2)), ""]
    lines += _compared(comparison) if comparison is not None else []
    lines += against_lines(header, warnings, only_judged=comparison is not None)
    lines += _by_reason({test: reasons for test, reasons in warnings.items() if reasons})
    lines += _by_reason(
        {
            test: [note["text"] for note in each["notes"] if note["kind"] != NoteKind.WARNING]
            for test, each in stored.items()
        }
    )
    skipped = {
        test: [f"skipped: {outcome['reason']}"]
        for test, outcome in header["outcomes"].items()
        if OutcomeKind(outcome["kind"]).skipped
    }
    lines += _by_reason(skipped)
    lines += _thresholds(header)
    lines += _timing(header.get("timing"))
    status = header["verdict"]["status"]
    first, *others = header["verdict"]["reasons"]
    return [*lines, f"{status}: {first}", *(f"{' ' * len(status)}  {reason}" for reason in others)]


def markdown(document: Mapping[str, Any], lines: Sequence[str]) -> str:
    """A stored run's verdict with its reasons, as a page or a part of one: folded away its `summary_lines`, and of two sides
    all metrics."""
    header = document["ddpperf"]
    told = two_sides(header)
    folded = {"all tests": lines} | ({"all metrics": every_metric(told)} if told is not None else {})
    page = [f"{PAGE_BEGINS}{header['verdict']['status']}", "", *_fenced(header["verdict"]["reasons"]), ""]
    for what, hidden in folded.items():
        page += [f"<details><summary>{what}</summary>", "", *_fenced(hidden), "", "</details>", ""]
    return "\n".join(page)


def _fenced(lines: Sequence[str]) -> list[str]:
    """Lines that Markdown leaves as they are: between more backticks than any of them has."""
    ticks = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}text", *lines, fence]


def _table(
    header: Mapping[str, Any],
    stored: Mapping[str, Any],
    warnings: Mapping[str, list[str]],
    comparison: Comparison | None,
) -> list[tuple[str, ...]]:
    """The rows, the column names first; what is compared is left out where nothing is."""
    compared = ("ratio", "limit") if comparison is not None else ()
    sets = ("sets",) if _most_sets(stored) > 1 else ()
    rows: list[tuple[str, ...]] = [
        ("test", "time", "IQR", "ranks", *sets, *compared, "overhead", "outcome", "metrics")
    ]
    overhead = header.get("timing", {}).get("overhead_seconds", {})
    for test, outcome in header["outcomes"].items():
        change = comparison.changes.get(test) if comparison is not None else None
        ratio = _ratio(change) if change is not None else ("-",) * len(compared)
        cost = f"{overhead[test]:.1f} s" if test in overhead else "-"
        ended = f"{outcome['kind']}, doubtful" if warnings.get(test) else outcome["kind"]
        metrics = _metrics(stored[test]["metrics"]) if test in stored else ""
        between = (_spread_over_sets(stored.get(test)),) * len(sets)
        rows.append((short(test), *_time(stored.get(test)), *between, *ratio, cost, ended, metrics))
    return rows


def _ratio(change: Change) -> tuple[str, str]:
    """The ratio, marked where it is not of times or a suspect's, and its limit."""
    mark = " cpu" if change.quantity == "CPU seconds" else " suspect" if change.suspect else ""
    return f"{change.ratio:.3f}{mark}", f"{change.limit:.4g}"


def _compared(comparison: Comparison) -> list[str]:
    """What the ratios are, and what all of them say together."""
    lines = [f"ratio: step time over that in {comparison.baseline}; above its limit it is slower"]
    if any(change.quantity == "CPU seconds" for change in comparison.changes.values()):
        lines.append(
            f"ratio with cpu: CPU seconds over those in {comparison.baseline}, for launches bound the step's time"
        )
    if (shift := comparison.median_shift()) is not None:
        timed = sum(change.quantity == "step" for change in comparison.changes.values())
        by = f"{abs(math.expm1(shift)):.1%} {'longer' if shift > 0 else 'shorter'}"
        lines.append(f"median shift of {units.counted(timed, 'time')}: {by} than in {comparison.baseline}")
    if comparison.controls is not None and (controls := comparison.controls.measured()):
        ratios = ", ".join(
            f"{what} {change.ratio:.3f} (limit {change.limit:.4g})" for what, change in controls.items()
        )
        lines.append(f"controls: {ratios}")
    if suspects := comparison.suspects:
        named = _most({test: change.ratio - 1 for test, change in suspects.items()})
        measure = "measure them against the baseline's code, with --baseline-root or --baseline-python"
        lines.append(f"{units.counted(len(suspects), 'suspect')}, as {named}: {measure}")
    if drifts := comparison.drifts:
        slower = {test: math.expm1(change) for test, change in drifts.items() if change > 0}
        found = (
            f"{units.counted(len(slower), 'test')} slower, as {_most(slower)}" if slower else "no test slower"
        )
        lines.append(
            f"slow drift, last {DRIFT_RUNS} runs against first {DRIFT_RUNS} promoted: {found}, of {len(drifts)}"
        )
    return lines


def _most(excess: Mapping[str, float]) -> str:
    """The tests with most of it, and how much."""
    tests = sorted(excess, key=lambda test: -excess[test])[:NAMED]
    return ", ".join(f"{short(test)} ({excess[test]:+.1%})" for test in tests)


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
    return max((len(each["samples"]) for each in stored.values()), default=0)


def warnings_of(stored: dict[str, Any]) -> list[str]:
    """What makes a stored test's figures doubtful: what was seen while it ran, and what its rounds and its legs' show."""
    warnings = [f"{WARNING}{note['text']}" for note in stored["notes"] if note["kind"] == NoteKind.WARNING]
    warnings += _warnings_of_rounds(Measured.from_json(stored), "the")
    spread = 0
    for name, reference in stored["references"].items():
        measured = Measured.from_json(reference)
        of_reference = _warnings_of_rounds(measured, f"{name}'s")
        spread += any(SPREAD in warning for warning in of_reference)
        warnings += of_reference
        ranks = [spread_over_ranks(sample.seconds) or 0.0 for sample in measured.samples]
        if name == SLOWEST_COUNTS and max(ranks) > DOUBTFUL_DEVICES:
            warnings.append(
                f"warning: {name}'s devices differ by more than {DOUBTFUL_DEVICES:.0%}, the slowest counts"
            )
    if spread > NAMED:
        named = f"{WARNING}the rounds of several that it rests on {SPREAD}"
        warnings = [
            named if SPREAD in warning and f"{WARNING}the rounds" not in warning else warning
            for warning in warnings
        ]
    return list(dict.fromkeys(warnings))


def _warnings_of_rounds(measured: Measured, whose: str) -> list[str]:
    rounds = [measured.step_seconds(sample) for sample in measured.samples]
    if measured.spec.counts:  # one round says all
        return []
    if min(map(len, rounds)) < FEWEST_ROUNDS:
        return [
            f"warning: fewer than {FEWEST_ROUNDS} rounds of it, or of what it rests on: their spread is not known"
        ]
    warnings = []
    if median(map(relative_iqr, rounds)) > NOISY_IQR:
        warnings.append(f"warning: {whose} rounds {SPREAD}")
    drifts = [change for seconds in rounds if (change := drift(seconds)) is not None]
    if drifts:
        warnings.append(
            f"warning: {whose} rounds drift by {max(drifts, key=abs):+.0%} from the first to the last"
        )
    if measured.spec.captured and min(measured.launch_bound().values(), default=1.0) < CHANGED_PACE:
        warnings.append(
            f"warning: {whose} steps took less time back to back than one by itself: the GPU changed its pace"
        )
    return warnings


def _by_reason(reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each reason, with the tests that have it, or how many."""
    tests: dict[str, list[str]] = {}
    for test, each in reasons.items():
        for reason in each:
            tests.setdefault(reason, []).append(short(test))
    return [
        f"{reason}: {named[0] if len(named) == 1 else f'{len(named)} tests'}"
        for reason, named in sorted(tests.items())
    ]


def _thresholds(header: Mapping[str, Any]) -> list[str]:
    """How many of the hardware's thresholds some test was held to."""
    thresholds = header.get("thresholds", {"known": 0})
    if not thresholds["known"]:
        return [f"thresholds: none for {header['hardware_key']}"]
    return [
        f"thresholds: {thresholds['applied']} of the {thresholds['known']} for {header['hardware_key']} were applied"
    ]


def _timing(timing: Mapping[str, Any] | None) -> list[str]:
    """What of the run's time was spent measuring."""
    if timing is None or not timing["overhead_seconds"]:
        return []
    total, counted = timing["seconds"], timing["counted_seconds"]
    overhead = median(timing["overhead_seconds"].values())
    return [
        f"took {total:.0f} s, {counted / total:.0%} of it in rounds that count; overhead {overhead:.1f} s a test (median)"
    ]


def _time(stored: dict[str, Any] | None) -> tuple[str, str, str]:
    """Of the median set: seconds of a step, their spread over rounds, and over the ranks that worked together."""
    if stored is None:
        return "-", "-", "-"
    measured = Measured.from_json(stored)
    rounds = [measured.step_seconds(sample) for sample in measured.samples]
    iqr = f"{median(map(relative_iqr, rounds)):.1%}" if min(map(len, rounds)) >= FEWEST_ROUNDS else "-"
    together = [
        [ranks[: measured.spec.world_size] for ranks in sample.seconds] for sample in measured.samples
    ]
    spreads = [spread for rounds in together if (spread := spread_over_ranks(rounds)) is not None]
    seconds = median(measured.median_step_seconds().values())
    return units.seconds(seconds), iqr, f"{median(spreads):.1%}" if spreads else "-"


def _spread_over_sets(stored: dict[str, Any] | None) -> str:
    """How far the slowest set is from the fastest, as a fraction of the median one."""
    seconds = list(Measured.from_json(stored).median_step_seconds().values()) if stored is not None else []
    return f"{(max(seconds) - min(seconds)) / median(seconds):.1%}" if len(seconds) > 1 else "-"


def _metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(format_metric(name, metric["value"], metric["unit"]) for name, metric in metrics.items())
