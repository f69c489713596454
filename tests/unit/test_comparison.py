"""What a comparison shows by default: what changed, what the changes have in common, and counts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddpperf.report.comparison import comparison_lines, headline, sides
from ddpperf.report.summary import next_step, summary_lines, verdict_lines
from ddpperf.specs import TrainingSpec
from tests.unit.test_summary import SIDE, Json, found, judged, only_stored, passed, stored

SAME = {"finding": "not worse", "suspicious": False, "ratio": 1.001, "low": 0.99, "high": 1.01, "steps": 40}
ROUNDS = (0.1, 0.1, 0.1, 0.1001)
AGAIN = {"stages": ["first", "repeat"], "steps": 120}


def step(world_size: int, batch: int, **fields: Any) -> TrainingSpec:
    return TrainingSpec(world_size=world_size, per_rank_batch_size=batch, strategy="ddp", **fields)


def steps(*, without: int = 24) -> Json:
    """Two steps without buffer synchronization, and others with it."""
    slow = {f"test_weak_scaling[slow-{b}]": stored(0.1, spec=step(2, b, buffer_sync=False)) for b in (32, 64)}
    others = {f"test_weak_scaling[{b}]": stored(0.1, spec=step(2, b)) for b in range(2, 2 + without)}
    run = passed(**slow | others)
    run["ddpperf"]["options"] |= {"model": "resnet18", "precision": "fp32", "executions": ["eager"]}
    return run


def compared(*, status: str = "FAIL", without: int = 24, **fields: Any) -> Json:
    """A comparison in which the steps without buffer synchronization are slower."""
    slow = [
        found(f"test_weak_scaling[slow-{batch}]", ratio=ratio, base=0.1, candidate=0.1 * ratio, **AGAIN)
        for batch, ratio in ((32, 1.03), (64, 1.02))
    ]
    others = [found(f"test_weak_scaling[{b}]", **SAME) for b in range(2, 2 + without)]
    run = judged(steps(without=without), *slow, *others, compared_with="0001_x.json", **fields)
    run["ddpperf"]["judged"]["rows"] = [*run["ddpperf"]["judged"]["rows"]]
    names = [f"perf/test_it.py::test_weak_scaling[slow-{batch}] is worse: its time" for batch in (32, 64)]
    run["ddpperf"]["verdict"] = {"status": status, "reasons": names if status == "FAIL" else ["why"]}
    return run


def last_verdict(lines: list[str]) -> int:
    return max(place for place, line in enumerate(lines) if line.startswith("FAIL: "))


def short(run: Json) -> str:
    return "\n".join([*summary_lines(run, verbose=False), *verdict_lines(run["ddpperf"], verbose=False)])


def test_worse_measurements_have_both_times_both_changes_and_the_interval() -> None:
    head, larger, smaller, *_ = [line for line in comparison_lines(compared(), 110) if line]
    assert re.split(r" {2,}", head) == [
        "WORSE",
        "2 of 26 measurements",
        "base",
        "candidate",
        "change",
        "98% interval",
    ]
    name = "weak scaling, 2 GPUs, batch {}, ddp+no_buffer_sync"
    changes = ["100.0 ms", "103.0 ms", "+3.000 ms", "+3.0%", "+5.0% to +15.0%"]
    assert re.split(r" {2,}", larger.strip()) == [name.format(32), *changes]
    assert re.split(r" {2,}", smaller.strip())[:4] == [name.format(64), "100.0 ms", "102.0 ms", "+2.000 ms"]
    name = "test_weak_scaling[slow-32]"
    assert headline(compared()["ddpperf"]) == (
        f"2 of 26 measurements are worse, such as {name} by +3.0% (+3.000 ms)"
    )


def test_verdict_is_the_first_and_one_of_the_last_lines() -> None:
    lines = short(compared()).splitlines()
    assert lines[0].startswith(
        "FAIL: 2 of 26 measurements are worse, such as test_weak_scaling[slow-32] by +3.0%"
    )
    first, second, *_ = lines[last_verdict(lines) :]
    assert first == lines[0]
    assert second == "      next: see it again:"
    verbose = "\n".join(summary_lines(compared()))
    assert "SCALING" in verbose
    assert "SCALING" not in short(compared())


def test_headline_names_a_measurement_that_was_measured_again() -> None:
    run = compared()
    run["ddpperf"]["judged"]["rows"][2] |= {"finding": "worse", "ratio": 1.5, "stages": ["first"]}
    name = "test_weak_scaling[slow-32]"
    assert headline(run["ddpperf"]) == f"3 of 26 measurements are worse, such as {name} by +3.0% (+3.000 ms)"


def test_headline_of_one_measurement_says_which_metric_grew() -> None:
    memory = {"metric": "peak_memory_bytes", "base": 1e6, "candidate": 1.1e6}
    run = judged(steps(), found("test_weak_scaling[slow-32]", **memory))
    assert headline(run["ddpperf"]) == (
        "1 of 1 measurement is worse: test_weak_scaling[slow-32] by +10.0% (+100 KB, peak memory)"
    )
    del run["benchmarks"][0]
    assert any("  test_weak_scaling[slow-32]: peak memory  " in line for line in comparison_lines(run, 150))


def test_all_measurements_are_shown_on_request() -> None:
    run = compared()
    rows = run["ddpperf"]["judged"]["rows"]
    rows[3] |= {"finding": "undecided", "open": False}
    rows[4] |= {"finding": "for information"}
    lines = comparison_lines(run, 150, verbose=True)
    heads = [re.split(r" {2,}base", line)[0] for line in lines if "98% interval" in line]
    assert heads == [
        *("WORSE     2 of 25 measurements", "UNDECIDED 1 of 25 measurements"),
        *("NOT WORSE 22 of 25 measurements", "UNJUDGED  1 of 26 measurements"),
    ]
    assert sum(line.startswith("  weak scaling") for line in lines) == 26
    assert "UNDECIDED weak scaling, 2 GPUs, batch 3 (" in short(run)


def test_change_that_cannot_be_measured_is_0() -> None:
    run = compared()
    run["ddpperf"]["judged"]["rows"][0] |= {"ratio": 0.9998, "candidate": 0.09998}
    (line,) = [line for line in comparison_lines(run, 150) if "batch 32" in line]
    assert re.split(r" {2,}", line)[4:6] == ["0", "0.0%"]


def test_names_that_were_not_measured_again_are_less_certain() -> None:
    run = compared()
    assert "CERTAIN" not in short(run)
    run["ddpperf"]["judged"]["rows"][1] |= {"stages": ["first"]}
    assert "CERTAIN   the first one, measured again; the other one only once: on average, 1 of 20" in short(
        run
    )


def test_bytes_that_did_not_grow_are_a_count() -> None:
    run = compared()
    same = {"ratio": 1.0, "candidate": 0.1, "finding": "not worse"}
    for metric in ("peak_memory_bytes", "gradients_bytes", "communicated_bytes_per_epoch"):
        run["ddpperf"]["judged"]["rows"].append(found("test_weak_scaling[24]", metric=metric, **same))
    unchanged = "BYTES     no more peak memory in 1 measurement, no more bytes sent in 1 measurement"
    assert unchanged in short(run)
    run["ddpperf"]["judged"]["rows"][-1] |= {"finding": "worse"}
    assert "no more peak memory in 1 other measurement, no more bytes sent in 1 other" in short(run)


def test_speedups_stand_beside_those_of_the_base() -> None:
    run = compared()
    one = len(run["benchmarks"]) - 1  # becomes the step on one device
    alone = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single")
    run["benchmarks"][one]["extra_info"]["ddpperf"] |= stored(0.1, spec=alone)
    for place in (0, 2, 3):  # the first one has another strategy than most
        run["benchmarks"][place]["extra_info"]["ddpperf"] |= {
            "references": {"one_device": stored(0.1, spec=alone)},
            "metrics": stored(0.1, metrics={"efficiency": 0.75, "speedup": 1.5})["metrics"],
        }
    rows = run["ddpperf"]["judged"]["rows"]
    rows[2] |= {"ratio": 1.25}
    rows[3] |= {"ratio": 1.0}
    rows[one] |= {"ratio": 1.0}
    shown = "batch per device 2: 1.50x (75.0%, base 93.8%), 3: 1.50x (75.0%, base 75.0%)"
    assert f"weak, speedup on 2 devices (efficiency), {shown}" in " ".join(short(run).split())
    rows[one] |= {"ratio": 1.25}
    assert "2: 1.50x (75.0%, base 75.0%), 3: 1.50x (75.0%, base 60.0%)" in " ".join(short(run).split())


@pytest.mark.parametrize(
    ("over_ddp", "shown"),
    [
        (1.1, "ddp+bf16, 1.10x ± 0.01 over ddp"),
        (1.005, "none is faster than ddp for certain"),
    ],
)
def test_comparison_names_the_fastest_strategy_and_the_exposed_communication(
    over_ddp: float, shown: str
) -> None:
    split = {"exposed_comm_seconds": 0.03, "traced_exposed_comm_seconds": 0.01}
    faster = stored(*ROUNDS, spec=step(2, 32, comm_hook="bf16"), metrics={"speedup_over_ddp": over_ddp})
    slower = stored(*ROUNDS, spec=step(2, 32, bucket_cap_mb=1), metrics={"speedup_over_ddp": 0.9})
    for one in (faster, slower):
        one["references"] = {"ddp": stored(*ROUNDS, spec=step(2, 32))}
    run = judged(
        passed(
            **{"test_comm_split[2]": stored(0.1, spec=step(2, 32), metrics=split)},
            **{"test_strategies[slower]": slower, "test_strategies[faster]": faster},
        ),
        found("test_comm_split[2]", **SAME),
        compared_with="0001_x.json",
    )
    run["ddpperf"]["verdict"] = {"status": "PASS", "reasons": ["nothing got slower"]}
    assert "exposed communication, 2 devices, batch 32: 10% to 30% of a step" in short(run)
    assert f"fastest strategy: {shown}" in short(run)


def test_what_slower_measurements_have_in_common_is_said_if_it_separates_them() -> None:
    common = "no_buffer_sync: 2 of 2 decided ones with it are slower, none of 24 without it"
    assert f"COMMON    {common}" in short(compared())
    run = compared()
    for row in run["ddpperf"]["judged"]["rows"][2:8]:
        row |= {"finding": "worse", "stages": ["first"]}
    assert "COMMON" not in short(run), "six steps without it are slower, too"


def test_slower_measurements_within_the_tolerance_are_named() -> None:
    run = compared()
    moved = {"low": 1.001, "ratio": 1.02, "finding": "not worse"}
    run["ddpperf"]["judged"]["rows"][1] |= moved
    name = "weak scaling, 2 GPUs, batch 64, ddp+no_buffer_sync (+2.000 ms, +2.0%)"
    assert f"ALSO slower, too, but too little to fail: {name}" in re.sub(r"\s+", " ", short(run))
    assert "ALSO" not in short(compared())


def test_what_was_excluded_is_said_without_a_pass() -> None:
    said = "EXCLUDED  slow-downs above 1.0% for half of the 24 times that are not worse, above 1.0% for all"
    for status in ("FAIL", "PASS", "NO VERDICT"):
        assert said in short(compared(status=status)).replace("\n         ", "")
    run = compared()
    for row in run["ddpperf"]["judged"]["rows"][2:]:
        row["high"] = 1.01021
    run["ddpperf"]["judged"]["rows"][2]["high"] = 0.9
    assert "above 1.1% for half of the 24 times that are not worse, above 1.1% for all" in short(run), (
        "rounded up"
    )


def test_undecided_measurements_are_a_table_unless_something_is_worse() -> None:
    run = judged(
        steps(), found("test_weak_scaling[slow-32]", finding="undecided"), compared_with="0001_x.json"
    )
    run["ddpperf"]["verdict"] = {"status": "NO VERDICT", "reasons": ["why"]}
    assert "UNDECIDED 1 of 1 measurement" in short(run)
    both = compared()
    both["ddpperf"]["judged"]["rows"][3] |= {"finding": "undecided", "ratio": 1.01}
    assert "UNDECIDED weak scaling, 2 GPUs, batch 3 (-1.0% to +1.0%)" in short(both)


def test_bytes_that_changed_are_named_by_their_metric() -> None:
    exact = {"metric": "buffers_bytes", "base": 0.0, "candidate": 38560.0, "ratio": float("inf"), "low": None}
    run = compared()
    run["ddpperf"]["judged"]["rows"].append(found("test_weak_scaling[24]", **exact))
    (line,) = [line for line in short(run).splitlines() if ": buffers" in line]
    assert re.split(r" {2,}", line.strip()) == [
        "weak scaling, 2 GPUs, batch 24: buffers",
        "0 B",
        "38.56 KB",
        "+38.56 KB",
    ]


def test_nothing_that_got_worse_is_a_few_lines() -> None:
    """The counts stand for the tables of all tests."""
    run = compared(status="PASS")
    for row in run["ddpperf"]["judged"]["rows"]:
        row |= SAME
    run["ddpperf"]["verdict"]["reasons"] = ["26 tests measured, nothing got slower: half of them exclude 1%"]
    lines = short(run).splitlines()
    assert lines[0] == "PASS: 26 tests measured, nothing got slower"
    assert len(lines) <= 10
    assert lines[-3] == lines[0]
    verbose = verdict_lines(run["ddpperf"])
    assert verbose[0] == "PASS: 26 tests measured, nothing got slower: half of them exclude 1%"


@pytest.mark.parametrize(
    ("base", "candidate", "shown"),
    [
        ({"root": "/p/.ddpperf/base/abc/0a1b2c3d4"}, {}, "0001_x.json 0a1b2c3d4 -> 0a1b2c3d4+"),
        ({"root": "/p/.ddpperf/base/abc/0a1b2c3d4+"}, {}, "0001_x.json 0a1b2c3d4+ -> 0a1b2c3d4+ (A/A)"),
        ({"root": None}, {"environment": {"X": "1"}}, "0001_x.json -> 0a1b2c3d4+ X=1"),
    ],
)
def test_both_sides_are_named(base: Json, candidate: Json, shown: str) -> None:
    run = compared(sides={"base": SIDE | base, "candidate": SIDE | candidate})
    assert sides(run["ddpperf"]) == shown
    assert shown in short(run).splitlines()[1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("perf/ --base perf/faster --replicates 6", "--base perf/faster --replicates 6"),
        ("--model perf.models:tiny perf/ -x", "--model perf.models:tiny -x"),
        ("--benchmark-json perf.json --report=tests.html perf/", ""),
        ("-x ./perf/ -kfoo -m 'not slow' -p timelog", "-x -p timelog"),
        ("-p timelog -k 'a or b' --report r.html --candidate X=1 perf2/", "-p timelog --candidate X=1"),
        ("perf/ --benchmark-compare --benchmark-json=x.json", "--benchmark-compare"),
        ("--benchmark-compare perf/test_a.py::test_b", "--benchmark-compare"),
        ("--benchmark-compare 0001 -v perf", "--benchmark-compare 0001 -v"),
    ],
)
def test_next_command_keeps_the_values_of_options(given: str, kept: str) -> None:
    run = compared()
    run["ddpperf"]["options"]["command_line"] = given
    test = "perf/test_it.py::test_weak_scaling[slow-32]"
    assert next_step(run["ddpperf"]) == f"see it again: python -m pytest '{test}' {kept}".rstrip()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    text = "\n".join(comparison_lines(compared(), width))
    assert text.count("+5.0% to +15.0%") == 2
    assert text.count("no_buffer_sync") >= 2


def test_a_run_whose_rows_are_older_is_shown() -> None:
    """Rows of schema 2 have neither `open` nor `steps`."""
    row = only_stored("test_weak_scaling[slow-32]", finding="undecided")
    run = judged(steps(), row, compared_with="0001_x.json")
    run["ddpperf"]["verdict"] = {"status": "NO VERDICT", "reasons": ["why"]}
    assert "UNDECIDED 1 of 1 measurement" in short(run)


def test_reasons_that_no_table_shows_come_first() -> None:
    """A failed test, or a control that failed, is not hidden behind slower measurements."""
    run = compared()
    run["ddpperf"]["verdict"]["reasons"].insert(0, "perf/test_it.py::test_b failed: the loss is worse: 0.5")
    lines = short(run).splitlines()
    assert (
        lines[0]
        == lines[last_verdict(lines)]
        == "FAIL: perf/test_it.py::test_b failed: the loss is worse: 0.5"
    )


def test_faster_measurements_are_named() -> None:
    run = compared(status="PASS")
    for row in run["ddpperf"]["judged"]["rows"]:
        row |= SAME
    faster = {"ratio": 0.8, "low": 0.79, "high": 0.81, "base": 0.1, "candidate": 0.08}
    run["ddpperf"]["judged"]["rows"][5] |= faster
    assert "FASTER    weak scaling, 2 GPUs, batch 5 (-20.00 ms, -20.0%)" in short(run)
    run["ddpperf"]["judged"]["rows"][5] |= {"high": 1.05}
    assert "FASTER" not in short(run), "noise explains it"


def test_advice_has_the_whole_command() -> None:
    run = compared()
    given = "-p timelog perf/ -k 'a or b' --report r.html --candidate X=1 --benchmark-compare=0001 perf2/"
    run["ddpperf"]["options"]["command_line"] = given
    advice = "run the same command again"
    run["ddpperf"]["verdict"] = {"status": "NO VERDICT", "reasons": ["why"], "advice": advice}
    same = given.replace("--report r.html ", "")
    assert next_step(run["ddpperf"]) == f"run this again: python -m pytest {same}"


def test_what_was_excluded_holds_for_the_mean_time_too() -> None:
    run = compared()
    run["ddpperf"]["judged"]["rows"].append(
        found("test_weak_scaling[25]", metric="mean_time", **SAME | {"high": 1.2})
    )
    assert "above 20.0% for all (weak scaling, 2 GPUs, batch 25)" in re.sub(r"\s+", " ", short(run))


def test_a_failed_control_excludes_nothing() -> None:
    run = compared(status="NO VERDICT")
    run["ddpperf"]["verdict"]["reasons"] = [
        "the positive control failed: a delayed step is not slower",
        "another",
    ]
    assert "EXCLUDED" not in short(run)


def test_tests_that_share_a_measurement_count_once() -> None:
    """Only one of both computes the bytes."""
    run = compared()
    rows = run["ddpperf"]["judged"]["rows"]
    rows[2]["tests"] = [*rows[2]["tests"], *rows.pop(3)["tests"]]
    bytes_of_one = {"metric": "buffers_bytes", "tests": rows[2]["tests"][1:]}
    rows.append(found("", **SAME | bytes_of_one))
    assert headline(run["ddpperf"]).startswith("2 of 25 measurements")


def test_equal_code_is_no_new_baseline() -> None:
    same = {"base": SIDE | {"root": "/p/.ddpperf/base/abc/0a1b2c3d4+"}, "candidate": SIDE}
    run = compared(status="PASS", sides=same)
    run["ddpperf"]["options"]["command_line"] = "perf/ --benchmark-compare --benchmark-json=x.json"
    words = "base and candidate were the same code; commit a change, then compare: python -m pytest perf/"
    assert next_step(run["ddpperf"]) == f"{words} --benchmark-compare"
