"""The summary: durations with four significant digits, and a table in which every collected test has its row."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpperf.analysis.compare import Change, Comparison
from ddpperf.report.summary import format_seconds, summary_lines
from ddpperf.results import Measured, Sample
from ddpperf.specs import AllReduceSpec
from tests.strategies import BOUNDED

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
SPEC = AllReduceSpec(world_size=2, nbytes=1024)
FILE = "perf/test_it.py::"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.234 s"),
        (0.1321, "132.1 ms"),
        (45.6e-6, "45.60 us"),
        (12.3456, "12.35 s"),
        (123.456, "123.5 s"),
        (1234.4, "1234 s"),
        (1.0, "1.000 s"),
        (1e-3, "1.000 ms"),
        (1e-6, "1.000 us"),
        (9.994e-3, "9.994 ms"),
    ],
)
def test_seconds_have_four_significant_digits_in_the_unit_that_suits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@BOUNDED
@given(st.floats(1e-7, 1e5))
def test_a_formatted_duration_can_be_read_back(seconds: float) -> None:
    value, unit = format_seconds(seconds).split(" ")
    assert float(value) * UNITS[unit] == pytest.approx(seconds, rel=5.01e-4, abs=5.01e-10)


@BOUNDED
@given(st.floats(1e-6, 9999))
@example(9.99999)
@example(0.9999999)
def test_every_duration_has_four_significant_digits(seconds: float) -> None:
    value, _ = format_seconds(seconds).split(" ")
    assert len(value.replace(".", "")) == 4


# --- the table


def stored(*step_seconds: float, notes: tuple[str, ...] = (), **metrics: float) -> dict[str, Any]:
    seconds = tuple((each,) for each in step_seconds)
    sample = Sample(set="A1", side="A", torch="2.11", seconds=seconds)
    return {
        **Measured(spec=SPEC, iterations=1, samples=(sample,)).to_json(),
        "notes": list(notes),
        "metrics": {name: {"value": value, "unit": "", "by_set": {"A1": value}} for name, value in metrics.items()},
    }


def document(
    measured: dict[str, dict[str, Any]], outcomes: dict[str, str], *, status: str = "PASS", reasons: tuple[str, ...] = ("good",)
) -> dict[str, Any]:
    return {
        "benchmarks": [{"fullname": FILE + test, "extra_info": {"ddpperf": each}} for test, each in measured.items()],
        "ddpperf": {
            "hardware_key": "h200x4",
            "environment": {"torch": "2.11.0", "backend": "nccl", "nccl": "2.27.5", "nvls": None, "commit": "0a1b2c3d4+"},
            "options": {"rounds": 10},
            "outcomes": {FILE + test: {"outcome": outcome, "reason": ""} for test, outcome in outcomes.items()},
            "verdict": {"status": status, "reasons": list(reasons)},
        },
    }


def row(lines: list[str], test: str) -> list[str]:
    (line,) = [line for line in lines if re.match(rf"{re.escape(test)}\s{{2}}", line)]
    return re.split(r" {2,}", line)


def test_each_test_has_a_row_with_value_and_spread() -> None:
    measured = {"test_a": stored(0.1, 0.1, 0.1, 0.1), "test_b": stored(0.04, 0.05, 0.05, 0.07)}
    lines = summary_lines(document(measured, {"test_a": "passed", "test_b": "failed"}))
    assert row(lines, "test") == ["test", "step", "IQR", "ratio", "limit", "outcome", "metrics"]
    assert row(lines, "test_a") == ["test_a", "100.0 ms", "0.0%", "-", "-", "passed"]
    assert row(lines, "test_b") == ["test_b", "50.00 ms", "15.0%", "-", "-", "failed"]
    assert lines[-1] == "PASS: good"


def test_a_test_that_was_not_measured_has_a_row_too() -> None:
    lines = summary_lines(document({"test_a": stored(0.1)}, {"test_a": "passed", "test_b": "not run", "test_c": "skipped"}))
    assert row(lines, "test_b") == ["test_b", "-", "-", "-", "-", "not run"]
    assert row(lines, "test_c") == ["test_c", "-", "-", "-", "-", "skipped"]


def test_a_run_in_which_no_rank_started_has_a_table() -> None:
    run = document({}, {"test_a": "failed"}, status="FAIL", reasons=("test_a failed: no port",))
    run["ddpperf"]["environment"] = {"commit": "nogit"}
    lines = summary_lines(run)
    assert lines[0] == "ddpperf on h200x4, 10 rounds, 0 process sets"
    assert row(lines, "test_a") == ["test_a", "-", "-", "-", "-", "failed"]
    assert lines[-1] == "FAIL: test_a failed: no port"


def test_metrics_are_scaled_for_reading() -> None:
    training = stored(0.1, speedup=3.655, efficiency=0.9123, images_per_second=12345.6)
    all_reduce = stored(0.1, algbw_bytes_per_second=236.09e9, busbw_bytes_per_second=354.1e9)
    lines = summary_lines(document({"test_a": training, "test_b": all_reduce}, {"test_a": "passed", "test_b": "passed"}))
    assert row(lines, "test_a")[-1] == "speedup 3.65x, efficiency 91.2%, 12,346 images/s"
    assert row(lines, "test_b")[-1] == "algbw 236 GB/s, busbw 354 GB/s"


def test_an_unknown_metric_is_printed_with_its_name_and_unit() -> None:
    each = stored(0.1, speedup=2.0)
    each["metrics"]["joules"] = {"value": 1234.56, "unit": "J", "by_set": {"A1": 1234.56}}
    assert row(summary_lines(document({"test_a": each}, {"test_a": "passed"})), "test_a")[-1] == "speedup 2.00x, joules 1235 J"


@pytest.mark.parametrize(
    ("environment", "rounds", "sets", "title"),
    [
        ({}, 10, 1, "nccl 2.27.5, commit 0a1b2c3d4+, 10 rounds, 1 process set"),
        ({"nvls": "0"}, 10, 2, "nccl 2.27.5, NVLS off, commit 0a1b2c3d4+, 10 rounds, 2 process sets"),
        ({"nvls": "1"}, 1, 1, "nccl 2.27.5, commit 0a1b2c3d4+, 1 round, 1 process set"),
        ({"backend": "gloo", "nccl": None}, 3, 1, "gloo, commit 0a1b2c3d4+, 3 rounds, 1 process set"),
    ],
)  # fmt: skip
def test_the_title_says_what_was_run(environment: dict[str, Any], rounds: int, sets: int, title: str) -> None:
    few, many = stored(0.1), stored(0.1)
    many["samples"] *= sets
    run = document({"test_a": few, "test_b": many}, {"test_a": "passed", "test_b": "passed"})
    run["ddpperf"]["environment"] |= environment
    run["ddpperf"]["options"]["rounds"] = rounds
    assert summary_lines(run)[0] == f"ddpperf on h200x4, torch 2.11.0, {title}"


@pytest.mark.parametrize(
    ("step_seconds", "spread"),
    [((0.1,), "-"), ((0.1, 0.2, 0.3), "-"), ((0.1, 0.1, 0.1, 0.1), "0.0%"), ((1.0, 2.0, 3.0, 4.0, 5.0), "66.7%")],
)
def test_fewer_than_four_rounds_have_no_spread(step_seconds: tuple[float, ...], spread: str) -> None:
    assert row(summary_lines(document({"test_a": stored(*step_seconds)}, {"test_a": "passed"})), "test_a")[2] == spread


@pytest.mark.parametrize(
    ("wide", "lines"),
    [
        ([], []),
        ([(0.1, 0.2, 0.3)], []),  # too few to tell
        ([(0.1, 0.1, 0.125, 0.125)], []),  # 22 %
        ([(0.1, 0.1, 0.13, 0.13)], ["doubtful: the rounds of 1 test spread by more than 25% (IQR)"]),
        ([(0.1, 0.1, 0.2, 0.2)] * 2, ["doubtful: the rounds of 2 tests spread by more than 25% (IQR)"]),
    ],
)
def test_rounds_that_spread_widely_are_doubtful(wide: list[tuple[float, ...]], lines: list[str]) -> None:
    measured = {f"test_{index}": stored(*each) for index, each in enumerate([(0.1,) * 4, *wide])}
    summary = summary_lines(document(measured, dict.fromkeys(measured, "passed")))
    assert [line for line in summary if "doubtful" in line] == lines


def test_the_ratio_and_its_limit_are_shown() -> None:
    run = document({"test_a": stored(0.1), "test_b": stored(0.1)}, {"test_a": "passed", "test_b": "passed"})
    change = Change(then_seconds=0.05, now_seconds=0.1, limit=1.5)
    comparison = Comparison(baseline="0001_x.json", changes={f"{FILE}test_a": change})
    lines = summary_lines(run, comparison)
    assert row(lines, "test_a")[3:5] == ["2.000", "1.5"]
    assert row(lines, "test_b")[3:5] == ["-", "-"]
    assert "ratio: step time over that in 0001_x.json; above its limit it is slower" in lines
    assert not any(line.startswith("ratio:") for line in summary_lines(run))


def test_what_makes_a_time_doubtful_is_told_once() -> None:
    measured = {"test_a": stored(0.1, notes=("doubtful: 2 ranks share 1 cores",) * 2), "test_b": stored(0.1)}
    lines = summary_lines(document(measured, {"test_a": "passed", "test_b": "passed"}))
    assert [line for line in lines if "doubtful" in line] == ["test_a: doubtful: 2 ranks share 1 cores"]


def test_further_reasons_stand_below_the_first() -> None:
    run = document({"test_a": stored(0.1)}, {"test_a": "passed"}, status="NO VERDICT", reasons=("first", "second", "third"))
    assert summary_lines(run)[-3:] == ["NO VERDICT: first", "            second", "            third"]


def test_columns_are_aligned() -> None:
    measured = {"test_a": stored(0.1, speedup=2.0), "test_with_a_long_name": stored(0.0123, speedup=1.0)}
    header, first, second = summary_lines(document(measured, {"test_a": "passed", "test_with_a_long_name": "passed"}))[2:5]
    end_of_step = header.index("step") + len("step")
    assert first[:end_of_step].endswith("100.0 ms")
    assert second[:end_of_step].endswith("12.30 ms")
    assert first.index("passed") == second.index("passed") == header.index("outcome")
    assert first.index("speedup") == second.index("speedup") == header.index("metrics")
