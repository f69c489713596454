"""The summary of a test run as lines of text: tables, facts worth knowing, and the verdict."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from ddpperf.analysis.comm_split import AGREEMENT
from ddpperf.machine.links import rates_in_words
from ddpperf.report.comparison import (
    EQUAL_SIDES,
    certain_first,
    comparison_lines,
    headline,
    interval,
    measurements_of,
    sides,
)
from ddpperf.report.experiment_columns import DETAILS
from ddpperf.report.round_warnings import ONE_DEVICE
from ddpperf.report.stored_cases import (
    Case,
    cases_of,
    judged_rows,
    looks_worse,
    of_functions,
    usual_properties,
    usual_strategy,
    without_file,
)
from ddpperf.report.tables import EXPOSED, tables_of
from ddpperf.report.terminal_tables import table_lines, wrapped
from ddpperf.results import units
from ddpperf.results.command_words import MAY_HAVE_A_VALUE, OF_COMPARISONS, command_words
from ddpperf.results.metrics import find, find_or_plain
from ddpperf.results.outcomes import AGAIN, OutcomeKind, Status
from ddpperf.results.stored_runs import is_ab_run
from ddpperf.specs import from_json
from ddpperf.verdict.controls import LEAST_SHOWN
from ddpperf.verdict.thresholds import WORDS_OF_BOUNDS, BoundKind

WIDTH = 110  # characters of a line, unless the output is a terminal
MOST_NAMED = 3  # tests that one line names
MOST_ROWS = {"collectives": 6}  # of tables in a run of many tables
MOST_REASONS = 8  # of a verdict
TITLE_BEGINS = "ddpperf on "
COMMAND = ": python -m "  # stands on a line of its own, so that it can be copied
PLUS_MINUS = "± is half of a 95% interval."
FEW_TABLES = 3  # with at most so many tables, the explanations of results are shown, too
MARKUP = {Status.PASS: "green", Status.FAIL: "red", Status.NO_VERDICT: "yellow"}
USUAL = ("model", "execution", "strategy")  # properties
OVER_DDP = "speedup_over_ddp"
LABEL = 12  # characters, of a line's first word such as "skipped"


def summary_lines(document: Mapping[str, Any], *, width: int = WIDTH, verbose: bool = True) -> list[str]:
    """Return the tables of a stored run, and what is worth knowing about the run, as lines of text.

    verbose: whether all tests are shown. Otherwise, a comparison shows what changed, and another run
    shows the first rows of a table, and names the tables of details.
    """
    header = document["ddpperf"]
    compared = "judged" in header
    facts = dict(summary_facts(document))
    lines = wrapped(title(document), width)
    if compared:
        lines = wrapped_verdict(header["verdict"]["status"], sentences(header)[:1], width) + lines
        lines += comparison_lines(document, width, verbose=verbose)
    if compared and not verbose:
        return [*lines, *_labelled(_facts_of_changes(document, facts), width)]
    tables = [] if is_ab_run(header) else tables_of(document)
    few = len(tables) <= FEW_TABLES
    hidden: list[str] = []
    for table in tables:
        count = len(table.tests)
        if verbose or few:
            lines += ["", *table_lines(table, width, notes=few)]
        elif table.title in DETAILS:
            hidden.append(f"{table.title} ({units.counted(count, 'test')})")
        else:
            most = MOST_ROWS.get(table.title, count)
            lines += table_lines(table.brief(most), width, notes=False)
            lines += [f"  and {count - most} more: -v shows them"] * (count > most)
    if hidden:
        shown = f"Also measured: {', '.join(hidden)}; -v shows them. {PLUS_MINUS}"
        lines += wrapped(shown, width)
    else:
        lines += ["", *[f"{PLUS_MINUS}"] * any(" ± " in line for line in lines)]
    for sentence in highlights(document):
        lines += wrapped(sentence, width)
    if not (verbose or few):
        advised = [line for line in facts["skipped"] if "--" in line]
        others = len(facts["skipped"]) - len(advised)
        tests = sum(OutcomeKind(outcome["kind"]).skipped for outcome in header["outcomes"].values())
        tests -= sum(int(found[1]) if (found := re.search(r"(\d+) tests$", line)) else 1 for line in advised)
        more = [f"{units.counted(tests, 'test')} for {units.counted(others, 'other reason')}: -rs says why"]
        facts["skipped"] = advised + more * bool(others)
    return [*lines, *_labelled(facts.items(), width)]


def _facts_of_changes(
    document: Mapping[str, Any], facts: Mapping[str, Sequence[str]]
) -> list[tuple[str, Sequence[str]]]:
    """Return what a reader of a comparison must know besides what changed."""
    header = document["ddpperf"]
    outcomes = header["outcomes"].items()
    skipped = sum(OutcomeKind(outcome["kind"]).skipped for _, outcome in outcomes)
    left_out = sum(header.get("left_out", {}).values())
    not_run = [f"{left_out} tests of --full"] * bool(left_out)
    not_run += [f"{skipped} skipped (-rs says why)"] * bool(skipped)
    cannot = [
        f"{without_file(test)}: {found['reason']}"
        for test, found in outcomes
        if found["kind"] == OutcomeKind.CANDIDATE_CANNOT
    ]
    delayed = [
        f"a step delayed{by or ' on purpose'} took {row['ratio']:.3f} times as long "
        f"({interval(row) or 'interval not known'}{least})"
        for row in judged_rows(header)
        if row["control"] == "delayed step"
        for by, least in (_delay(row.get("tolerance")),)
    ]
    return [
        ("compared", [line for line in facts["compared"] if not re.match(r"\d", line)]),
        ("control", delayed),
        *((name, facts[name]) for name in ("idle load", "nodes", "machine")),
        ("scaling", [] if is_ab_run(header) else [*_scaling_in_short(cases_of(document))]),
        ("thresholds", _thresholds_in_short(header, facts["thresholds"])),
        ("not run", [*([", ".join(not_run)] if not_run else []), *cannot]),
        ("time", facts["time"]),
    ]


def _delay(tolerance: float | None) -> tuple[str, str]:
    """Return by how much the control step was delayed, and how much of that must show, as texts."""
    if not tolerance:
        return "", ""
    return f" by {tolerance:.0%}", f"; {1 + LEAST_SHOWN * tolerance:.3f} is enough"


def _thresholds_in_short(header: Mapping[str, Any], sentences: Sequence[str]) -> list[str]:
    """Return how many thresholds are met, and the one that is missed most, if one is missed."""
    checks = header.get("thresholds", {}).get("checks", ())
    if all(check["held"] for check in checks):
        return [sentence.partition(";")[0] for sentence in sentences] if checks else []
    return [*sentences]


def _labelled(facts: Iterable[tuple[str, Sequence[str]]], width: int) -> list[str]:
    lines: list[str] = []
    for label, sentences in facts:
        for number, sentence in enumerate(sentences):
            first = ("" if number else label).ljust(LABEL)
            lines += wrapped(sentence, width, first=first, indent=LABEL)
    return lines


def summary_facts(document: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return sentences on the whole run, with a label for each subject."""
    header = document["ddpperf"]
    return [
        ("compared", _compared(header)),
        ("A/B", list(filter(None, [header.get("judged", {}).get("late")]))),
        ("controls", _controls(header)),
        ("idle load", _idle_load(header)),
        ("thresholds", [_thresholds(header)]),
        ("nodes", _nodes(header["environment"].get("nodes", []))),
        ("machine", _machine(header.get("machine_findings", []))),
        ("skipped", _skipped(header)),
        ("left out", _left_out(header.get("left_out", {}))),
        ("time", _timing(header.get("timing"))),
    ]


def highlights(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on a stored run, the most important first; an A/B run answers only what changed."""
    return [] if is_ab_run(document["ddpperf"]) else [*_scaling(cases_of(document))]


def _scaling(cases: Sequence[Case]) -> Iterator[str]:
    """Name the step with the lowest efficiency, and its exposed communication by difference and by trace."""
    scaled = [
        case
        for case in of_functions(cases, "test_weak_scaling", "test_strong_scaling")
        if "efficiency" in case.metrics
    ]
    count = len(scaled)
    scaled = [case for case in scaled if case.properties["strategy"] != "data_parallel"]
    which = "Lowest efficiency without DataParallel" if len(scaled) < count else "Lowest efficiency"
    usual = usual_properties(scaled[0].header).get("execution") if scaled else None
    scaled = [case for case in scaled if case.properties["execution"] == usual] or scaled
    if not scaled:
        return
    worst = min(scaled, key=lambda case: case.value("efficiency") or 0.0)
    speedup, efficiency = worst.value("speedup") or 0.0, worst.value("efficiency") or 0.0
    slower = ", slower than one device" if speedup < 1 else ""
    scaling = f"{worst.experiment.kind} scaling, speedup {units.factor(speedup)}{slower}"
    yield (f"{which}: {units.percent(efficiency)} ({scaling}): {worst.described()}.")
    for split in of_functions(cases, "test_comm_split"):
        if split.measured.spec == worst.measured.spec and (share := _exposed_share(split)):
            low, high = share
            uncertain = ", which is uncertain" if high - low > AGREEMENT else ""
            lost, exposed = f"{1 - efficiency:.0%}", f"{low:.0%} to {high:.0%}{uncertain}"
            yield f"This step loses {lost} of its time: {exposed} to communication, the rest to slower work."


def _exposed_share(split: Case) -> tuple[float, float] | None:
    """Return the least and the most of a step that is exposed communication, if both are measured."""
    found = [split.value(metric) for metric in EXPOSED]
    ends = sorted(max(value, 0.0) / split.seconds for value in found if value is not None)
    return (ends[0], ends[1]) if len(ends) == len(EXPOSED) else None


def _scaling_in_short(cases: Sequence[Case]) -> Iterator[str]:
    """Name the speedups on most devices, the exposed communication, and the fastest strategy."""
    usual = {"strategy": usual_strategy(cases), **(usual_properties(cases[0].header) if cases else {})}
    for kind in ("weak", "strong"):
        found: dict[int, list[str]] = {}
        for case in of_functions(cases, f"test_{kind}_scaling"):
            efficiency, properties = case.value("efficiency"), case.properties
            if efficiency is not None and all(properties[name] == usual.get(name) for name in USUAL):
                change = _change_of_efficiency(cases, case)
                base = f", base {units.percent(efficiency / change)}" if change else ""
                batch = properties.get("global batch") or properties["batch"]
                speedup = units.factor(case.value("speedup") or 0.0)
                speedups = found.setdefault(case.measured.spec.world_size, [])
                speedups.append(f"{batch}: {speedup} ({units.percent(efficiency)}{base})")
        for devices in sorted(found)[-1:]:
            batches = "global batch" if kind == "strong" else "batch per device"
            what = f"{kind}, speedup on {units.counted(devices, 'device')} (efficiency), {batches}"
            yield f"{what} {', '.join(found[devices])}"
    for split in of_functions(cases, "test_comm_split")[-1:]:
        if share := _exposed_share(split):
            devices, batch = split.measured.spec.world_size, split.properties["batch"]
            where = f"{units.counted(devices, 'device')}, batch {batch}"
            yield f"exposed communication, {where}: {share[0]:.0%} to {share[1]:.0%} of a step"
    strategies = [case for case in of_functions(cases, "test_strategies") if case.value(OVER_DDP)]
    for best in sorted(strategies, key=lambda case: -(case.value(OVER_DDP) or 0.0))[:1]:
        value, error = best.value(OVER_DDP) or 0.0, (best.compared_with(OVER_DDP) or (0.0, math.inf))[1]
        noise = f" ± {value * error:.2f}" if math.isfinite(error) else ""
        speedup = f"{best.properties['strategy']}, {units.factor(value)}{noise} over ddp"
        faster = value * (1 - error) > 1
        yield f"fastest strategy: {speedup if faster else 'none is faster than ddp for certain'}"


def _change_of_efficiency(cases: Sequence[Case], scaled: Case) -> float | None:
    """Return the candidate's efficiency over the base's; None if a step was not compared."""
    if (one_device := scaled.references.get(ONE_DEVICE)) is None:
        return None
    rows = {
        test: row for row in judged_rows(scaled.header) if row["metric"] == "time" for test in row["tests"]
    }
    alone = [rows[case.test] for case in cases if case.measured.spec == one_device.spec and case.test in rows]
    if not alone or scaled.test not in rows:
        return None
    return float(alone[0]["ratio"] / rows[scaled.test]["ratio"])


def verdict_lines(header: Mapping[str, Any], *, width: int = WIDTH, verbose: bool = True) -> list[str]:
    """Return the verdict of a stored run, its first reasons, and the command to run next.

    verbose: whether each worse measurement is a reason, and which slow-downs a PASS excludes.
    """
    status = header["verdict"]["status"]
    reasons = [*header["verdict"]["reasons"]] if verbose else sentences(header)
    if (left := len(reasons) - MOST_REASONS) > 1:
        reasons[-left:] = [f"{left} more reasons: python -m ddpperf.report -o report.html lists them all"]
    advice, found, command = next_step(header).rpartition(COMMAND)
    lines = wrapped_verdict(status, [*reasons, f"next: {advice}{COMMAND[0] if found else command}"], width)
    return [*lines, f"{' ' * (len(status) + 2)}{COMMAND[2:]}{command}"] if found else lines


def wrapped_verdict(status: str, reasons: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for number, reason in enumerate(reasons):
        first = " " * (len(status) + 2) if number else f"{status}: "
        lines += wrapped(reason, width, first=first, indent=len(status) + 2)
    return lines


def sentences(header: Mapping[str, Any]) -> list[str]:
    """Return the reasons of a verdict. One sentence stands for all measurements that got worse."""
    reasons = [*header["verdict"]["reasons"]]
    if header["verdict"]["status"] == Status.PASS:
        return [reasons[0].partition(": half of")[0], *reasons[1:]]
    worse = list(filter(_is_worse, reasons))
    if worse and (found := headline(header)):
        place = reasons.index(worse[0])
        reasons = [reason for reason in reasons if not _is_worse(reason)]
        reasons.insert(place, found)
    return reasons


def _is_worse(reason: str) -> bool:
    """Return whether a reason of a verdict says that a test got worse; a test's own message may do so."""
    who, found, _ = reason.partition(" is worse: ")
    return bool(found) and ": " not in who


def worst_test(header: Mapping[str, Any]) -> str:
    """Return a test that got worse for certain, with the largest change; "" if none got worse."""
    worse = certain_first(one for one in measurements_of(header) if one.is_("worse"))
    return str(worse[0].row["tests"][0]) if worse else ""


def next_step(header: Mapping[str, Any]) -> str:
    """Return the advice that follows from the verdict, with the command to run next."""
    compared = header.get("compared_with")
    same = f"python -m pytest {command_words(header, tests=True) or 'perf/'}"
    match header["verdict"]["status"]:
        case Status.PASS if compared and sides(header).endswith(EQUAL_SIDES):
            return f"base and candidate were the same code; commit a change, then compare: {same}"
        case Status.PASS if compared:
            return "make this run the baseline: python -m ddpperf.results.promote"
        case Status.PASS if is_ab_run(header):
            words = command_words(header, tests=True, without=OF_COMPARISONS)
            words = words if "--script" in words else "perf/"
            return f"store a baseline of the accepted code: python -m pytest {words} --benchmark-save=NAME"
        case Status.PASS:
            words = command_words(header, tests=True, without=MAY_HAVE_A_VALUE) or "perf/"
            return f"commit, change the code, then compare: python -m pytest {words} --benchmark-compare"
        case Status.FAIL:
            failed = [test for test, outcome in header["outcomes"].items() if outcome["kind"] == "failed"]
            for test in filter(None, [*failed, worst_test(header)]):
                words = command_words(header, tests=False)
                return f"see it again: python -m pytest {shlex.quote(test)} {words}".rstrip()
            return f"find the thread or process that is busy between the rounds, then: {same}"
    if advice := header["verdict"].get("advice"):  # runs of schema 2 have none
        again = str(advice).replace(AGAIN, "run this again")
        return advice if again == advice else f"{again}: {same}"
    if compared:
        words = command_words(header, tests=True, without=("--max-seconds",)) or "perf/"
        return f"use a quieter machine, or more time: python -m pytest {words} --max-seconds 1200"
    return f"remove the reasons above, then run this again: {same}"


def title(document: Mapping[str, Any]) -> str:
    """Return the hardware, the software and the usual options of a run in one line."""
    header = document["ddpperf"]
    environment = header["environment"]
    data = header["options"].get("data", {"name": "synthetic"})
    sets = max(
        (len(found["extra_info"]["ddpperf"]["samples"]) for found in document["benchmarks"]), default=0
    )
    usual, strategy = usual_properties(header), usual_strategy(cases_of(document))
    specs = [found["extra_info"]["ddpperf"]["spec"] for found in document["benchmarks"]]
    named = {field.name for spec in specs for field in fields(from_json(spec))}  # a collective has no model
    parts = [
        f"{TITLE_BEGINS}{header['hardware_key']}",
        f"torch {environment['torch']}" if "torch" in environment and not is_ab_run(header) else "",
        " ".join(filter(None, (environment.get("backend"), _nccl(header)))),
        "not pinned" if environment.get("gpus") and isinstance(environment.get("pinning"), str) else "",
        "NVLS off" if environment.get("nvls") == "0" else "",
        rates_in_words(environment.get("links", [])),
        sides(header) or (f"commit {environment['commit']}" if environment["commit"] != "nogit" else ""),
        *(usual[name] for name in ("model", "precision", "execution") if name in usual.keys() & named),
        f"{strategy} unless named" if "judged" in header and strategy else "",
        f"{data['name']} images" if data["name"] != "synthetic" else "",
        units.counted(header["options"]["rounds"], "round"),
        units.counted(sets, "process set") if sets > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def _nccl(header: Mapping[str, Any]) -> str:
    """Return the run's version of NCCL; "" on a CPU, or if base and candidate have different versions."""
    both = (header.get("judged") or {}).get("sides") or {}
    found = {side.get("nccl") for side in both.values()} | {header["environment"].get("nccl")}
    found -= {None}
    return str(found.pop()) if len(found) == 1 else ""


def _compared(header: Mapping[str, Any]) -> list[str]:
    """Return sentences on the comparison of the run's times with those of a stored run."""
    if "judged" not in header or is_ab_run(header):
        return []
    lines, judged = [f"with {header['compared_with']}"], header["judged"]
    times = {
        test: row
        for row in judged_rows(header)
        if row["metric"] == "time" and row["stored_ratio"] is not None
        for test in row["tests"]
    }
    if times:
        change = median(row["stored_ratio"] for row in times.values()) - 1
        by = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than"
        by = "as long as" if by.startswith("0.0%") else by
        again = ", measured again" if any("stored run" not in row["stages"] for row in times.values()) else ""
        lines[0] += f"{again}; the candidate's times are in the median {by} stored"
    if new := judged["new"]:
        more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
        named = ", ".join(map(without_file, new[:MOST_NAMED]))
        lines.append(f"new, so compared with nothing: {named}{more}")
    if slower := {test: row["stored_ratio"] - 1 for test, row in times.items() if row["stored_slower"]}:
        lines.append(f"{units.counted(len(slower), 'test')} slower than stored, such as {_largest(slower)}")
    if drifts := judged["drifts"]:
        slower = {test: math.expm1(change) for test, change in drifts.items() if change > 0}
        found = f"{units.counted(len(slower), 'test')} slower, such as {_largest(slower)}"
        lines.append(
            "slow drift from the first baselines to the last runs: "
            f"{found if slower else 'no test slower'}, of {len(drifts)}"
        )
    return lines


def _largest(slowdowns: Mapping[str, float]) -> str:
    """Return the tests with the largest slow-downs, each with its slow-down, as text."""
    tests = sorted(slowdowns, key=lambda test: -slowdowns[test])[:MOST_NAMED]
    return ", ".join(f"{without_file(test)} ({slowdowns[test]:+.1%})" for test in tests)


def _controls(header: Mapping[str, Any]) -> list[str]:
    """Return the ratio of each control measurement, with its interval if it is known."""
    found = [
        f"{row['control']} {row['ratio']:.3f} times" + (f" ({ends})" if (ends := interval(row)) else "")
        for row in judged_rows(header)
        if row["control"] is not None
    ]
    return [", ".join(found)] if found else []


def _idle_load(header: Mapping[str, Any]) -> list[str]:
    """Return a sentence on each metric of all tests together that looks worse, such as idle_cpus."""
    return [
        f"{metric.heading} {row['finding']}: {metric.format(row['candidate'])} in the candidate, "
        f"{metric.format(row['base'])} in the base"
        for row in judged_rows(header)
        if not row["tests"] and row["control"] is None and looks_worse(row)
        for metric in (find_or_plain(row["metric"]),)
    ]


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the nodes of a run; none for a run on one node."""
    if len(nodes) < 2:
        return []
    named = ", ".join(f"node {number} ({node['name']})" for number, node in enumerate(nodes))
    link, ranks = nodes[0]["link"], units.counted(nodes[0]["ranks"], "rank")
    return [
        f"{named}: {ranks} each, connected by {link}; machine checks and energy are measured on node 0 only"
    ]


def _machine(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on what may have spoiled the run, as the doctor found at its start, worst first."""
    if not findings:
        return []
    worst, count = findings[0], units.counted(len(findings), "problem")
    return [f"{worst['subject']}: {worst['text']}. For advice on {count}: python -m ddpperf.doctor"]


def _skipped(header: Mapping[str, Any]) -> list[str]:
    """Return each reason of skipped tests, with the test or the number of tests that have it."""
    tests: dict[str, list[str]] = {}
    for test, outcome in header["outcomes"].items():
        if OutcomeKind(outcome["kind"]).skipped:
            tests.setdefault(outcome["reason"], []).append(without_file(test))
    return [
        f"{reason}: {named[0] if len(named) == 1 else f'{len(named)} tests'}"
        for reason, named in sorted(tests.items())
    ]


def _left_out(by_file: Mapping[str, int]) -> list[str]:
    """Return a sentence with the number of tests outside the core suite, which were not run."""
    if not by_file:
        return []
    return [f"{units.counted(sum(by_file.values()), 'test')} of the full suite; --full runs them"]


def _thresholds(header: Mapping[str, Any]) -> str:
    """Return how many bounds hold, and the metric that came nearest to its bound or missed it most.

    Metrics with exact bounds, such as bytes, are never the nearest: they equal their bounds or miss
    them.
    """
    thresholds = header.get("thresholds", {"known": 0})
    if not thresholds["known"]:
        return f"none for {header['hardware_key']}"
    known = f"{thresholds['known']} for {header['hardware_key']}"
    checks = thresholds.get("checks", ())  # older runs stored only counts
    if not checks:
        return f"none of {known} applied"
    missed = [check for check in checks if not check["held"]]
    line = f"{len(checks) - len(missed)} of {len(checks)} met"
    inexact = [check for check in checks if check["kind"] != BoundKind.EXACT and check["value"] is not None]
    if not inexact:
        return line
    nearest = min(inexact, key=_distance)
    metric = find(nearest["metric"])
    value, bound = metric.text(nearest["value"]), metric.format(nearest["bound"])
    what = "nearest" if nearest["held"] else "missed most"
    end = WORDS_OF_BOUNDS[nearest["kind"]][-1]
    return f"{line}; {what}: {without_file(nearest['test'])} {value}, {end} {bound}"


def _distance(check: Mapping[str, Any]) -> float:
    """Return by which fraction of its bound a metric is better than the bound."""
    distance = float(check["value"] / check["bound"] - 1)
    return distance if check["kind"] == BoundKind.FLOOR else -distance


def _timing(timing: Mapping[str, Any] | None) -> list[str]:
    if timing is None or not timing["counted_seconds"]:
        return []
    total, counted = timing["seconds"], timing["counted_seconds"]
    return [f"{total:.0f} s, {counted / total:.0%} of it in timed rounds"]


def markup(line: str) -> dict[str, bool]:
    """Return the colours of a line of the output on a terminal, as arguments of pytest's writer."""
    for status, look in MARKUP.items():
        if line.startswith(f"{status}: "):
            return {look: True, "bold": True}
    if re.match(r"  !\d", line):
        return {"yellow": True}
    return {"bold": True} if re.match(r"[A-Z_]{4,}[A-Z_' ]*  ", line) else {}
