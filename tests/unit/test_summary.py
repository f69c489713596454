"""The summary: a row for every collected test, warnings, notes and skips."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddpperf.report.summary import summary_lines
from ddpperf.report.warnings import warnings_of
from ddpperf.results.notes import Note, info, warning
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, Spec, TrainingSpec
from ddpperf.verdict.stored_run_comparison import Change, Comparison

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
FILE = "perf/test_it.py::"
RISING = tuple(0.1 + 0.001 * number for number in range(10))
Json = dict[str, Any]


FEW = "warning: fewer than 4 rounds, so their spread is unknown"
ALONE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


def stored(
    *step_seconds: float | tuple[float, ...],
    notes: tuple[Note, ...] = (),
    spec: Spec = SPEC,
    metrics: Mapping[str, float] | None = None,
) -> Json:
    """A stored test. step_seconds: of each round, by rank, or one number for the slowest."""
    seconds = tuple(each if isinstance(each, tuple) else (each,) for each in step_seconds)
    sample = Sample(set="A1", side="A", torch="2.11", seconds=seconds)
    return {
        **Measured(spec=spec, iterations=1, samples=(sample,)).to_json(),
        "references": {},
        "notes": [each.to_json() for each in notes],
        "metrics": {
            name: {"value": value, "unit": "J", "by_set": {"A1": value}}
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
            "environment": {
                "torch": "2.11.0",
                "backend": "nccl",
                "nccl": "2.27.5",
                "nvls": None,
                "commit": "0a1b2c3d4+",
            },
            "options": {"rounds": 10},
            "outcomes": {FILE + test: {"kind": outcome, "reason": ""} for test, outcome in outcomes.items()},
            "verdict": {"status": status, "reasons": reasons or ["good"]},
        },
    }


def passed(**measured: Json) -> Json:
    return document(measured, dict.fromkeys(measured, "passed"))


def row(lines: list[str], test: str) -> list[str]:
    (line,) = [line for line in lines if re.match(rf"{re.escape(test)}\s{{2}}", line)]
    return re.split(r" {2,}", line)


def starting(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if line.startswith(word)]


def test_each_test_has_a_row_with_value_and_spreads() -> None:
    measured = {
        "test_a": stored(*[(0.1, 0.1)] * 4),
        "test_b": stored((0.04, 0.02), (0.05, 0.04), (0.05, 0.04), (0.07, 0.04)),
    }
    lines = summary_lines(document(measured, {"test_a": "passed", "test_b": "failed"}))
    assert row(lines, "test") == ["test", "time", "IQR", "ranks", "overhead", "outcome", "metrics"]
    assert row(lines, "test_a") == ["test_a", "100.0 ms", "0.0%", "0.0%", "-", "passed"]
    assert row(lines, "test_b") == ["test_b", "50.00 ms", "15.0%", "22.2%", "-", "failed"]
    assert lines[-1] == "PASS: good"


def test_median_of_several_sets_is_shown() -> None:
    """What spreads between sets is not the spread of rounds."""
    run = passed(test_a=stored(*[0.1] * 4), test_b=stored(0.1, 0.1, 0.1, 0.2))
    first, *_ = run["benchmarks"][0]["extra_info"]["ddpperf"]["samples"]
    others = [
        {**first, "set": f"A{number}", "seconds": [[seconds]] * 4}
        for number, seconds in ((2, 0.2), (3, 0.11))
    ]
    run["benchmarks"][0]["extra_info"]["ddpperf"]["samples"] += others
    lines = summary_lines(run)
    assert lines[0].endswith("10 rounds, 3 process sets")
    assert row(lines, "test") == ["test", "time", "IQR", "ranks", "sets", "overhead", "outcome", "metrics"]
    assert row(lines, "test_a") == ["test_a", "110.0 ms", "0.0%", "-", "90.9%", "-", "passed"]
    assert row(lines, "test_b")[1:5] == ["100.0 ms", "25.0%", "-", "-"]


def test_run_without_ranks_has_a_table_and_reasons() -> None:
    outcomes = {"test_a": "failed", "test_b": "not run", "test_c": "skipped"}
    run = document({}, outcomes, "FAIL", "test_a failed: no port", "second", "third")
    run["ddpperf"]["environment"] = {"commit": "nogit"}
    lines = summary_lines(run)
    assert lines[0] == "ddpperf on h200x4, 10 rounds, 0 process sets"
    assert row(lines, "test_a") == ["test_a", "-", "-", "-", "-", "failed"]
    assert row(lines, "test_b") == ["test_b", "-", "-", "-", "-", "not run"]
    assert row(lines, "test_c") == ["test_c", "-", "-", "-", "-", "skipped"]
    assert lines[-3:] == ["FAIL: test_a failed: no port", "      second", "      third"]


def test_spread_over_ranks_excludes_ranks_that_worked_alone() -> None:
    run = passed(test_a=stored((0.1, 0.2), spec=ALONE), test_b=stored((0.1, 0.2, 0.9)))
    assert row(summary_lines(run), "test_a")[1:4] == ["100.0 ms", "-", "-"]
    assert row(summary_lines(run), "test_b")[1:4] == ["200.0 ms", "-", "66.7%"]


def check(metric: str, value: float | None, bound: float, kind: str, held: bool = True) -> Json:
    """A stored check of a threshold."""
    test = f"{FILE}test_{metric}"
    return {"test": test, "metric": metric, "value": value, "bound": bound, "kind": kind, "held": held}


FLOOR = check("efficiency", 0.953, 0.9, "floor")
LIMIT = check("cpu_seconds", 0.004, 0.0041, "limit")
EXACT = check("gradients_over_parameters", 1.0, 1.0, "exact")
MISSED = check("speedup", 1.5, 2.0, "floor", held=False)


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ([], "none of 3 for h200x4 applied"),
        ([EXACT], "1 hold"),
        ([EXACT, FLOOR], "2 hold; nearest: test_efficiency efficiency 95.3%, floor 90.0%"),
        ([FLOOR, LIMIT], "2 hold; nearest: test_cpu_seconds CPU 4.000 ms, limit 4.100 ms"),
        (
            [FLOOR, check("cpu_seconds", 0.002, 0.0041, "limit")],
            "2 hold; nearest: test_efficiency efficiency 95.3%, floor 90.0%",
        ),
        ([LIMIT, MISSED, FLOOR], "2 hold, 1 missed; nearest: test_speedup speedup 1.50x, floor 2.00x"),
        ([check("speedup", None, 2.0, "floor", held=False)], "0 hold, 1 missed"),
    ],
)
def test_nearest_threshold_is_shown(checks: list[Json], words: str) -> None:
    run = passed(test_a=stored(0.1))
    run["ddpperf"]["thresholds"] = {"applied": len(checks), "known": 3, "checks": checks}
    assert starting(summary_lines(run), "thresholds") == [f"thresholds: {words}"]


def test_older_run_has_only_counts_of_thresholds() -> None:
    run = passed(test_a=stored(0.1))
    run["ddpperf"]["thresholds"] = {"applied": 2, "known": 3}
    assert starting(summary_lines(run), "thresholds") == ["thresholds: 2 of 3 for h200x4 applied"]


def test_overhead_is_shown() -> None:
    run = passed(test_a=stored(0.1), test_b=stored(0.1), test_c=stored(0.1))
    overhead = {f"{FILE}test_a": 2.34, f"{FILE}test_b": 0.04, f"{FILE}test_d": 1.26}
    run["ddpperf"]["timing"] = {"seconds": 80.0, "counted_seconds": 20.0, "overhead_seconds": overhead}
    lines = summary_lines(run)
    assert [row(lines, f"test_{name}")[4] for name in "abc"] == ["2.3 s", "0.0 s", "-"]
    assert starting(lines, "took") == ["took 80 s, 25% in timed rounds; median overhead 1.3 s per test"]
    run["ddpperf"]["timing"]["overhead_seconds"] = {}
    assert starting(summary_lines(run), "took") == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("speedup", 3.655, "speedup 3.65x"), ("efficiency", 0.9123, "efficiency 91.2%"),
        ("images_per_second", 12345.6, "throughput 12,346 images/s"),
        ("step_seconds", 0.0123, "step 12.30 ms"),
        ("loss_after_5_steps", 1.2346, "loss after 5 steps 1.235"),
        ("peak_memory_bytes", 1.234e9, "peak memory 1.234 GB"),
        ("busbw_bytes_per_second", 354.1e9, "busbw 354.1 GB/s"), ("missing_images", 3.0, "missing images 3"),
        ("loading_fraction_with_2_workers", 0.0456, "loading with 2 workers 4.6%"),
        ("accuracy_over_one_device_low", -0.0123, "accuracy over one device's at least -1.2%"),
        ("unknown", 1234.56, "unknown 1235 J"),
    ],
)  # fmt: skip
def test_metrics_are_scaled_for_reading(name: str, value: float, text: str) -> None:
    assert row(summary_lines(passed(test_a=stored(0.1, metrics={name: value}))), "test_a")[-1] == text
    two = stored(0.1, metrics={name: value, "joules": 2})
    assert row(summary_lines(passed(test_a=two)), "test_a")[-1] == f"{text}, joules 2 J"


@pytest.mark.parametrize(
    ("environment", "rounds", "sets", "title"),
    [
        ({}, 10, 1, "nccl 2.27.5, commit 0a1b2c3d4+, 10 rounds, 1 process set"),
        ({"nvls": "0"}, 10, 2, "nccl 2.27.5, NVLS off, commit 0a1b2c3d4+, 10 rounds, 2 process sets"),
        ({"nvls": "1"}, 1, 1, "nccl 2.27.5, commit 0a1b2c3d4+, 1 round, 1 process set"),
        ({"backend": "gloo", "nccl": None}, 3, 1, "gloo, commit 0a1b2c3d4+, 3 rounds, 1 process set"),
    ],
)  # fmt: skip
def test_title_says_what_was_run(environment: Json, rounds: int, sets: int, title: str) -> None:
    few, many = stored(0.1), stored(0.1)
    many["samples"] *= sets
    run = passed(test_a=few, test_b=many)
    run["ddpperf"]["environment"] |= environment
    run["ddpperf"]["options"]["rounds"] = rounds
    assert summary_lines(run)[0] == f"ddpperf on h200x4, torch 2.11.0, {title}"


def test_comparison_shows_ratio_and_limit() -> None:
    run = passed(test_a=stored(0.1), test_b=stored(0.1))
    change = Change(then_seconds=0.05, now_seconds=0.1, limit=1.5)
    lines = summary_lines(run, Comparison(baseline="0001_x.json", changes={f"{FILE}test_a": change}))
    assert row(lines, "test") == [
        "test",
        "time",
        "IQR",
        "ranks",
        "ratio",
        "limit",
        "overhead",
        "outcome",
        "metrics",
    ]
    assert row(lines, "test_a")[4:6] == ["2.000", "1.5"]
    assert row(lines, "test_b")[4:6] == ["-", "-"]
    assert starting(lines, "ratio: step time over that in 0001_x.json; above its limit the test is measured")
    assert not starting(lines, "ratio with cpu")
    assert not starting(summary_lines(run), "ratio")


def test_ratio_of_cpu_seconds_is_marked() -> None:
    run = passed(test_a=stored(0.1), test_b=stored(0.1))
    time = Change(then_seconds=0.1, now_seconds=0.1, limit=1.5)
    cpu = Change(then_seconds=0.004, now_seconds=0.00412, limit=1.25, quantity="CPU seconds")
    lines = summary_lines(
        run, Comparison(baseline="0001_x.json", changes={f"{FILE}test_a": cpu, f"{FILE}test_b": time})
    )
    assert row(lines, "test_a")[4:6] == ["1.030 cpu", "1.25"]
    assert row(lines, "test_b")[4:6] == ["1.000", "1.5"]
    assert "ratio with cpu: CPU seconds, because the step waits for the CPU" in lines


# --- what follows it


@pytest.mark.parametrize(
    ("rounds", "spread", "warnings"),
    [
        ((0.1,) * 4, "0.0%", []),
        ((0.1,), "-", [FEW]),
        ((0.1, 0.2, 0.3), "-", [FEW]),
        ((0.1, 0.1, 0.125, 0.125), "22.2%", []),
        ((0.1, 0.1, 0.13, 0.13), "26.1%", ["warning: the rounds spread by more than 25% (IQR)"]),
        (RISING, "4.3%", ["warning: the rounds drift by +9% from the first to the last"]),
        (RISING[::-1], "4.3%", ["warning: the rounds drift by -9% from the first to the last"]),
    ],
)
def test_rounds_that_spread_or_drift_are_warnings(
    rounds: tuple[float, ...], spread: str, warnings: list[str]
) -> None:
    lines = summary_lines(passed(test_a=stored(*rounds)))
    assert starting(lines, "warning") == [f"{each}: test_a" for each in warnings]
    assert row(lines, "test_a")[2] == spread
    assert row(lines, "test_a")[5] == ("passed !" if warnings else "passed")


def test_warnings_of_references_are_the_tests() -> None:
    """A noisy t(1), or one from a slow device, makes a speedup look too good."""
    test = stored(*(0.1,) * 4)
    test["references"] = {"one_device": stored((0.1, 0.1), (0.1, 0.1), (0.15, 0.1), (0.15, 0.1), spec=ALONE)}
    assert starting(summary_lines(passed(test_a=test)), "warning") == [
        "warning: one_device's rounds spread by more than 25% (IQR): test_a",
        "warning: single devices differ by more than 10%; t(1) is the slowest's: test_a",
    ]
    test["references"] = {"one_device": stored(0.1, spec=ALONE), "another": stored(0.1, spec=ALONE)}
    assert starting(summary_lines(passed(test_a=test)), "warning") == [f"{FEW}: test_a"]
    test["references"] = {"one_device": stored(*[(0.1, 0.109)] * 4, spec=ALONE)}
    assert starting(summary_lines(passed(test_a=test)), "warning") == []


@pytest.mark.parametrize(("slowdown", "warned"), [(1.19, True), (1.02, False)])
def test_graphs_at_the_slower_pace_are_a_warning(slowdown: float, warned: bool) -> None:
    test = stored(*(0.1,) * 4, spec=replace(ALONE, execution="graph"))
    test["samples"][0]["counters"] = {"graph_slowdown": [slowdown]}
    warnings = [
        "warning: the CUDA graphs were replayed at the GPU's slower pace: a small kernel took 1.19 times "
        "as long: test_a"
    ]
    assert starting(summary_lines(passed(test_a=test)), "warning") == warnings * warned


def test_largest_drift_of_several_sets_is_shown() -> None:
    test = stored(*RISING)
    test["samples"] += stored(*(0.1 + 2 * (seconds - 0.1) for seconds in reversed(RISING)))["samples"]
    assert starting(summary_lines(passed(test_a=test)), "warning: the rounds drift by -17%")


def test_warnings_notes_and_skips_are_grouped() -> None:
    shared = warning("4 ranks share 2 cores")
    run = passed(
        test_a=stored(*(0.1,) * 4, notes=(shared,)),
        test_b=stored(*(0.1,) * 4, notes=(shared, warning("loading limits the epoch"))),
        test_c=stored(
            *(0.1,) * 4, notes=(info("1 spoiled round was measured again: process 7 also uses GPU 0"),)
        ),
    )
    for test, reason in {
        "test_d": "it needs a GPU",
        "test_e": "it needs a GPU",
        "test_f": "it needs two",
    }.items():
        run["ddpperf"]["outcomes"][FILE + test] = {"kind": "skipped", "reason": reason}
    lines = summary_lines(run)
    assert lines[lines.index("") + 8 :] == [
        "",
        "warning: 4 ranks share 2 cores: 2 tests",
        "warning: loading limits the epoch: test_b",
        "1 spoiled round was measured again: process 7 also uses GPU 0: test_c",
        "skipped: it needs a GPU: 2 tests",
        "skipped: it needs two: test_f",
        "thresholds: none for h200x4",
        "PASS: good",
    ]
    outcomes = [row(lines, f"test_{name}")[5] for name in "abcd"]
    assert outcomes == ["passed !", "passed !", "passed", "skipped"]


def test_columns_are_aligned() -> None:
    run = passed(
        test_a=stored(0.1, metrics={"speedup": 2}),
        test_with_a_long_name=stored(0.0123, metrics={"speedup": 1}),
    )
    run["ddpperf"]["timing"] = {
        "seconds": 9.0,
        "counted_seconds": 1.0,
        "overhead_seconds": {f"{FILE}test_a": 100.04},
    }
    header, first, second = summary_lines(run)[2:5]
    for column, cases in {"time": ("100.0 ms", "12.30 ms"), "overhead": ("100.0 s", "-")}.items():
        end = header.index(column) + len(column)
        assert (first[:end].rpartition("  ")[2], second[:end].rpartition("  ")[2]) == cases
    assert first.index("passed") == second.index("passed") == header.index("outcome")
    assert first.index("speedup") == second.index("speedup") == header.index("metrics")


def test_many_noisy_references_share_one_warning() -> None:
    for references, lines in ((3, 3), (4, 1)):
        test = stored(1.0, 1.0, 1.0, 1.0) | {
            "references": {f"leg{each}": stored(1.0, 2.0, 1.0, 2.0) for each in range(references)}
        }
        assert (
            len([warning for warning in warnings_of(test) if "spread by more than 25% (IQR)" in warning])
            == lines
        )
