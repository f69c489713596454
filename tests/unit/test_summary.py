"""The summary: a row for every collected test, warnings, notes and skips."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddpperf.report.summary import highlights, summary_lines, verdict_lines
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, Spec, TrainingSpec
from ddpperf.verdict.stored_run_comparison import Change, Comparison

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
FILE = "perf/test_it.py::"
RISING = tuple(0.1 + 0.001 * number for number in range(10))
Json = dict[str, Any]


FEW = "fewer than 4 rounds, so their spread is unknown"
ALONE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


def stored(
    *step_seconds: float | tuple[float, ...],
    spec: Spec = SPEC,
    metrics: Mapping[str, float] | None = None,
) -> Json:
    """A stored test. step_seconds: of each round, by rank, or one number for the slowest."""
    seconds = tuple(each if isinstance(each, tuple) else (each,) for each in step_seconds)
    sample = Sample(set="A1", side="A", torch="2.11", seconds=seconds)
    return {
        **Measured(spec=spec, iterations=1, samples=(sample,)).to_json(),
        "references": {},
        "notes": [],
        "metrics": {
            name: {"value": value, "unit": find_or_plain(name).unit or "J", "by_set": {"A1": value}}
            for name, value in (metrics or {}).items()
        },
    }


def document(
    measured: dict[str, Json], outcomes: dict[str, str], status: str = "PASS", *reasons: str
) -> Json:
    return {
        "benchmarks": [
            {"fullname": FILE + test, "extra_info": {"ddpperf": each}} for test, each in measured.items()
        ],
        "ddpperf": {
            "hardware_key": "h200x4",
            "environment": {"torch": "2.11.0", "backend": "nccl", "commit": "0a1b2c3d4+"},
            "options": {"rounds": 10, "device": "cuda"},
            "outcomes": {FILE + test: {"kind": outcome, "reason": ""} for test, outcome in outcomes.items()},
            "verdict": {"status": status, "reasons": reasons or ["good"]},
        },
    }


def passed(**measured: Json) -> Json:
    return document(measured, dict.fromkeys(measured, "passed"))


def row(lines: list[str], label: str) -> list[str]:
    """The cells of the only line that begins with this cell."""
    (line,) = [line for line in lines if re.match(rf"\s*{re.escape(label)}\s{{2}}", line)]
    return re.split(r" {2,}", line.strip())


def labelled(lines: list[str], label: str) -> list[str]:
    """The sentences after a label such as "skipped", each with its continuation lines."""
    found: list[str] = []
    inside = False
    for line in lines:
        inside = line.startswith(label.ljust(12)) or (inside and line.startswith(" " * 12))
        if inside:
            found.append(line[12:])
    return found


def starting(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if line.startswith(word)]


def calls(*nbytes: int, **measured: Any) -> Json:
    """A run of all_reduces, one for each buffer size, which took 0.1 s."""
    tests = {f"test_all_reduce[{size}]": stored(*[0.1] * 4, spec=call(size)) for size in nbytes}
    return passed(**tests | measured)


def call(nbytes: int) -> AllReduceSpec:
    return AllReduceSpec(world_size=2, nbytes=nbytes)


def test_spread_is_the_median_of_the_sets() -> None:
    """What spreads between sets is not the spread of rounds."""
    run = calls(1024, 2048)
    samples = run["benchmarks"][0]["extra_info"]["ddpperf"]["samples"]
    for name, rounds in ("A2", (0.2,) * 4), ("A3", (0.1, 0.1, 0.125, 0.125)):
        samples.append({**samples[0], "set": name, "seconds": [[seconds] for seconds in rounds]})
    assert row(summary_lines(run), "1 KiB")[2] == "0%"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.9, 1.3, "1.000 (0.9000 to 1.300)"), (0.1, 3.0, "no usable fit"), (1.0, 1.0, "1.000")],
)
def test_interval_stands_beside_its_metric(low: float, high: float, text: str) -> None:
    """In the table of a single case, whose properties are all in the heading."""
    ends = {"latency_seconds_low": low * 1e-3, "latency_seconds_high": high * 1e-3}
    test = stored(*[0.1] * 4, metrics={"latency_seconds": 1e-3} | ends)
    title, headings, figures = summary_lines(passed(test_backend_model=test))[2:5]
    assert title == "ALL_REDUCE MODEL  2 GPUs, 1 KiB, eager"
    assert headings.split() == ["call", "ms", "IQR", "latency", "ms"]
    assert figures.split("0%")[1].strip() == text


def test_missed_threshold_is_shown() -> None:
    """Numbers of bounds that hold; test_docs.py shows the nearest bound if all hold."""
    fields = ("test", "metric", "value", "bound", "kind", "held")
    rows = (("t", "cpu_seconds", 0.004, 0.0041, "limit", True), ("t", "speedup", 1.5, 2.0, "floor", False))
    run = passed(test_a=stored(0.1))
    checks = [dict(zip(fields, row, strict=True)) for row in rows]
    run["ddpperf"]["thresholds"] = {"applied": 2, "known": 3, "checks": checks}
    words = "1 of 2 met; missed most: t speedup 1.50x, minimum 2.00x"
    assert labelled(summary_lines(run), "thresholds") == [words]


SLOWER = Change(then_seconds=0.05, now_seconds=0.1, limit=1.5)


def compared(run: Json, **changes: Change) -> Json:
    """A run that was compared with 0001_x.json; `changes` is by test, without its brackets."""
    comparison = Comparison(
        baseline="0001_x.json",
        changes={f"{FILE}test_all_reduce[{name[1:]}]": c for name, c in changes.items()},
    )
    run["ddpperf"] |= {"comparison": comparison.to_json(), "compared_with": "0001_x.json"}
    return run


@pytest.mark.parametrize(
    ("change", "cells"),
    [
        (SLOWER, ["2.000", "limit 1.5", "slower"]),
        (replace(SLOWER, now_seconds=0.05), ["1.000", "limit 1.5", "not slower"]),
        (replace(SLOWER, now_seconds=0.065, suspect_limit=1.2), ["1.300", "limit 1.5", "suspect"]),
        (replace(SLOWER, judged=False), ["2.000", "-", "for information"]),
    ],
)
def test_comparison_with_stored_times_has_ratio_and_finding(change: Change, cells: list[str]) -> None:
    lines = summary_lines(compared(calls(1024, 2048), _1024=change))
    assert row(lines, "buffer") == ["buffer", "call ms", "IQR", "ratio", "interval", "finding"]
    assert row(lines, "1 KiB")[3:] == cells
    assert row(lines, "2 KiB")[3:] == ["-", "-", "-"]
    assert labelled(lines, "compared")[0].startswith("with 0001_x.json")


def ab_row(test: str, **fields: Any) -> Json:
    """A stored finding of an A/B run."""
    seconds = {"metric": "time", "base": 0.1, "candidate": 0.11, "detectable": 0.03}
    found = {"ratio": 1.1, "low": 1.05, "high": 1.15, "finding": "worse", "confirmed": False}
    return {"test": FILE + test, "gated": True, "primary": True, "control": None} | seconds | found | fields


SIDE: Json = {"python": "/bin/python", "torch": "2.11", "root": None, "environment": {}}


def test_confirmation_replaces_the_comparison_with_stored_times() -> None:
    run = compared(calls(1024, 2048), _1024=SLOWER, _2048=SLOWER)
    rows = [ab_row("test_all_reduce[1024]", confirmed=True), ab_row("negative control", control="negative")]
    run["ddpperf"]["confirmed"] = {"base": SIDE, "candidate": SIDE, "rows": rows}
    lines = summary_lines(run)
    assert row(lines, "1 KiB")[3:] == ["1.100", "1.050 to 1.150", "worse, repeated"]
    assert row(lines, "2 KiB")[3:] == ["2.000", "limit 1.5", "slower"]
    assert labelled(lines, "controls") == ["a copy of memory 1.100 times (1.050 to 1.150)"]
    assert "The largest change is 1.100 (1.050 to 1.150), of test_all_reduce[1024]." in lines


def test_ab_run_shows_base_and_candidate() -> None:
    """A second metric has a row only where it got worse; test_frozen_numbers has the figures."""
    run = calls(1024, 2048)
    run["ddpperf"]["outcomes"][f"{FILE}test_all_reduce[2048]"]["kind"] = "failed"
    rows = [
        ab_row(f"test_all_reduce[{size}]", finding=finding, metric=metric, primary=metric == "time")
        for size, finding in ((1024, "worse"), (2048, "unchanged"))
        for metric in ("time", "peak_memory_bytes")
    ]
    run["ddpperf"]["against"] = {"base": SIDE, "candidate": SIDE | {"root": "/other"}, "rows": rows}
    lines = summary_lines(run)
    figures = ["ratio", "95% interval", "finding", "base", "candidate", "detectable"]
    assert row(lines, "buffer") == ["buffer", "metric", "outcome", *figures]
    found = [re.split(r" {2,}", line)[1:3] for line in starting(lines, "1 KiB")]
    assert found == [["time", "passed"], ["peak_memory_bytes", "passed"]]
    assert row(lines, "2 KiB")[2:6] == ["failed", "1.100", "1.050 to 1.150", "unchanged"]
    assert labelled(lines, "A/B")[:2] == [
        "base: /bin/python, torch 2.11",
        "candidate: /bin/python, torch 2.11, code in /other",
    ]


# --- warnings, explanations and what was not measured


def warned(lines: list[str]) -> list[str]:
    """The warnings, without their numbers."""
    return [text for line in lines if (text := re.sub(r"^  !\d+ ", "", line)) != line]


@pytest.mark.parametrize(
    ("rounds", "spread", "warnings"),
    [
        ((0.1, 0.2, 0.3), "", [FEW]),
        ((0.1, 0.1, 0.125, 0.125), "22%", []),
        ((0.1, 0.1, 0.13, 0.13), "26%", ["the rounds spread by more than 25% (IQR)"]),
        (RISING, "4%", ["the rounds drift by +9% from the first to the last"]),
        (RISING[::-1], "4%", ["the rounds drift by -9% from the first to the last"]),
    ],
)
def test_rounds_that_spread_or_drift_are_warnings(
    rounds: tuple[float, ...], spread: str, warnings: list[str]
) -> None:
    lines = summary_lines(passed(test_own=stored(*rounds)))
    assert warned(lines) == warnings
    cells = lines[4].split()
    assert ("IQR" in lines[3], spread in cells) == (bool(spread), bool(spread))
    assert ("!1" in cells) == bool(warnings)


def test_warnings_of_references_are_the_tests() -> None:
    """A noisy t(1), or one from a slow device, makes a speedup look too good."""
    test = stored(*(0.1,) * 4)
    test["references"] = {"one_device": stored((0.1, 0.1), (0.1, 0.1), (0.15, 0.1), (0.15, 0.1), spec=ALONE)}
    assert warned(summary_lines(passed(test_a=test))) == [
        "the rounds of reference measurements spread by more than 25% (IQR)",
        "t(1) of the devices differs by more than 10%; the slowest device's t(1) is used",
    ]
    test["references"] = {"one_device": stored(*[(0.1, 0.109)] * 4, spec=ALONE)}
    assert warned(summary_lines(passed(test_a=test))) == []


# --- what is worth knowing, and what comes next


def test_worst_scaling_names_the_communication_of_its_step() -> None:
    spec = TrainingSpec(world_size=2, per_rank_batch_size=8, strategy="ddp")
    speeds = {"speedup": 0.9, "efficiency": 0.45}
    exposed = {"exposed_comm_seconds": 0.02, "traced_exposed_comm_seconds": 0.01}
    better, metrics = replace(spec, per_rank_batch_size=16), {"speedup": 1.9, "efficiency": 0.95}
    parallel = replace(spec, strategy="data_parallel")
    worst = {"speedup": 0.1, "efficiency": 0.05}  # not surprising, so not worth a sentence
    tests = {
        "test_weak_scaling[a]": stored(*[0.1] * 4, spec=spec, metrics=speeds),
        "test_weak_scaling[b]": stored(*[0.1] * 4, spec=better, metrics=metrics),
        "test_weak_scaling[c]": stored(*[0.1] * 4, spec=parallel, metrics=worst),
        "test_comm_split[a]": stored(*[0.1] * 4, spec=spec, metrics=exposed),
    }
    assert highlights(passed(**tests)) == [
        "Lowest efficiency: 45.0% (weak scaling, speedup 0.90x, slower than one device): 2 GPUs, "
        "batch 8 per rank, resnet18, eager, ddp.",
        "Exposed communication is 20% of this step by difference, 10% by trace, so it is uncertain.",
    ]


def test_a_verdict_has_few_reasons_and_says_where_all_are() -> None:
    reasons = [f"reason {number}" for number in range(10)]
    first, *lines = verdict_lines(document({}, {}, "NO VERDICT", *reasons)["ddpperf"])
    more = "2 more reasons: python -m ddpperf.report RUN.json -o report.html lists them all"
    assert [first, *(line.strip() for line in lines[:-1])] == ["NO VERDICT: reason 0", *reasons[1:8], more]


WORSE = [
    ab_row("control", control="positive", ratio=1.5),
    *(ab_row("test_a"), ab_row("test_b", metric="speedup", ratio=0.8)),
]


@pytest.mark.parametrize(
    ("status", "header", "command"),
    [
        ("PASS", {}, "python -m pytest perf/ --benchmark-compare"),
        ("PASS", {"compared_with": "0001_x.json"}, "python -m ddpperf.results.promote"),
        ("PASS", {"against": {"rows": []}}, "python -m pytest perf/ --benchmark-save=NAME"),
        ("FAIL", {"against": {"rows": WORSE}}, f"python -m pytest '{FILE}test_b'"),
        ("FAIL", {"outcomes": {"x.py::t": {"kind": "failed"}}}, "python -m pytest 'x.py::t'"),
        ("NO VERDICT", {"compared_with": "0001_x.json"}, "--max-seconds 1200"),
        ("NO VERDICT", {}, "run the same command again"),
    ],
)
def test_verdict_ends_with_the_next_command(status: str, header: Json, command: str) -> None:
    common = {"verdict": {"status": status, "reasons": ["why"]}, "outcomes": {}, "environment": {}}
    lines = verdict_lines({**common, **header})
    assert lines[0] == f"{status}: why"
    assert lines[1].startswith(" " * (len(status) + 2) + "next: ")
    assert command in lines[1]
