"""The summary: a row for every collected test, warnings, notes and skips."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest

from ddpperf.report.summary import summary_lines, title, verdict_lines
from ddpperf.report.tables import tables_of
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import read_document
from ddpperf.specs import AllReduceSpec, Spec, TrainingSpec
from ddpperf.specs.training_step import CommHook, Strategy
from tests.project import REPOSITORY

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
    (table,) = tables_of(run)
    assert {column.heading: column.cells[0] for column in table.figures}["call"] == "112.5"
    assert "IQR 0%" in table.common


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.9, 1.3, "1.000 ms (0.9000 to 1.300)"), (0.1, 3.0, "no usable fit"), (1.0, 1.0, "1.000 ms")],
)
def test_interval_stands_beside_its_metric(low: float, high: float, text: str) -> None:
    """In the table of a single case, whose properties are all in the heading."""
    ends = {"latency_seconds_low": low * 1e-3, "latency_seconds_high": high * 1e-3}
    test = stored(*[0.1] * 4, metrics={"latency_seconds": 1e-3} | ends)
    title, figures = summary_lines(passed(test_backend_model=test))[2:4]
    assert title == "ALL_REDUCE MODEL  2 GPUs, 1 KiB, eager"
    assert figures == f"  call 100.0 ms, IQR 0%, latency {text}"


def test_missed_threshold_is_shown() -> None:
    """Numbers of bounds that hold; test_docs.py shows the nearest bound if all hold."""
    fields = ("test", "metric", "value", "bound", "kind", "held")
    rows = (("t", "cpu_seconds", 0.004, 0.0041, "limit", True), ("t", "speedup", 1.5, 2.0, "floor", False))
    run = passed(test_a=stored(0.1))
    checks = [dict(zip(fields, row, strict=True)) for row in rows]
    run["ddpperf"]["thresholds"] = {"known": 3, "checks": checks}
    words = "1 of 2 met; missed most: t speedup 1.50x, minimum 2.00x"
    assert labelled(summary_lines(run), "thresholds") == [words]


WORLDS: tuple[tuple[int, Strategy], ...] = ((2, "ddp"), (1, "single"))
SIDE: Json = {"python": "/bin/python", "torch": "2.11", "root": None, "environment": {}}
COPY = {"tests": [], "control": "copy of memory", "finding": "not worse"}


def found(test: str, **fields: Any) -> Json:
    """A stored row, by default of a test that is worse in the first measurement."""
    seconds = {"metric": "time", "base": 0.1, "candidate": 0.11, "ratio": 1.1, "low": 1.05, "high": 1.15}
    flags = {"finding": "worse", "suspicious": True, "stages": ["first"], "control": None}
    stored_run = {"stored_ratio": None, "stored_slower": False}
    return {"tests": [f"{FILE}{test}"]} | seconds | flags | stored_run | fields


def only_stored(test: str, **fields: Any) -> Json:
    """A stored row of a test that was compared with its stored time only."""
    ratio = {"ratio": 1.002, "stored_ratio": 1.002, "low": None, "high": None, "stages": ["stored run"]}
    return found(test, **ratio | {"finding": "not worse", "suspicious": False} | fields)


def judged(run: Json, *rows: Json, compared_with: str = "", **fields: Any) -> Json:
    """A run that was compared with a stored run, or an A/B run."""
    sides = {"base": SIDE, "candidate": SIDE | {"root": "/other"}}
    nothing: Json = {"sides": sides, "late": "", "new": [], "drifts": {}}
    run["ddpperf"]["judged"] = nothing | {"rows": rows} | fields
    if compared_with:
        run["ddpperf"]["compared_with"] = compared_with
    return run


def test_comparison_says_how_the_machine_changed() -> None:
    slower = only_stored("b", ratio=1.3, stored_ratio=1.3, stored_slower=True)
    rows = found("a", stored_ratio=1.1), slower, only_stored("c"), found("d"), found("copy", **COPY)
    run = judged(calls(1024), *rows, compared_with="0001_x.json", new=["d"], drifts={"a": 0.1, "b": 0.0})
    lines = summary_lines(run)
    assert labelled(lines, "compared") == [
        "with 0001_x.json, measured again; the candidate's times are in the median 10.0% longer than stored",
        "new, so compared with nothing: d",
        "1 test slower than stored, such as b (+30.0%)",
        "slow drift from the first baselines to the last runs: 1 test slower, such as a (+10.5%), of 2",
    ]
    assert labelled(lines, "controls") == ["copy of memory 1.100 times (1.050 to 1.150)"]


@pytest.mark.parametrize(
    ("time", "fields", "shown"),
    [
        ("worse", {"metric": "peak_memory_bytes"}, 2),
        ("not worse", {"metric": "peak_memory_bytes"}, 1),
        ("undecided", {"metric": "peak_memory_bytes", "finding": "not worse"}, 0),
        ("worse", {"metric": "mean_time", "ratio": 1.3}, 1),  # says nothing that the time does not say
    ],
)
def test_metric_that_is_worse_has_its_own_row(time: str, fields: Json, shown: int) -> None:
    rows = found("test_all_reduce[1024]", finding=time), found("test_all_reduce[1024]", **fields)
    lines = summary_lines(judged(calls(1024, 2048), *rows))
    worse = [line for line in lines if line.startswith("WORSE")]
    assert [line.split()[1:4] for line in worse] == [["1", "of", "1"]] * (shown > 0)
    assert sum("+5.0% to +15.0%" in line for line in lines) == (shown or 1)


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ("2.28.9", ["nccl 2.28.9", "0a1b2c3d4+ -> 0a1b2c3d4+ LD_PRELOAD=x"]),
        ("2.30.7", ["nccl", "nccl=2.30.7"]),
    ],
)
def test_title_names_the_nccl_of_each_side(candidate: str, words: list[str]) -> None:
    changed = SIDE | {"nccl": candidate, "environment": {"LD_PRELOAD": "x"}}
    run = judged(calls(1024), sides={"base": SIDE | {"nccl": "2.28.9"}, "candidate": changed})
    run["ddpperf"]["environment"]["nccl"] = "2.28.9"
    line = title(run)
    assert all(word in line for word in words)
    assert ("nccl=2.28.9 -> " in line) == (candidate != "2.28.9")


def test_ab_run_shows_its_comparison_only() -> None:
    run = judged(calls(1024, 2048), found("test_all_reduce[1024]"), late="no time was left")
    lines = summary_lines(run)
    assert row(lines, "collectives, 2 GPUs, 1 KiB, all_reduce, nccl, eager")[1:] == [
        *("100.0 ms", "110.0 ms", "+10.00 ms", "+10.0%", "+5.0% to +15.0%")
    ]
    assert not any(line.startswith("COLLECTIVES") for line in lines)
    assert labelled(lines, "A/B") == ["no time was left"]


def test_load_of_idle_processes_is_shown_where_it_looks_worse() -> None:
    idle = found("", tests=[], metric="idle_cpus", base=0.01, candidate=0.95)
    (line,) = labelled(summary_lines(judged(calls(1024), idle)), "idle load")
    assert "0.95" in line
    quiet = idle | {"finding": "undecided", "suspicious": False}
    assert labelled(summary_lines(judged(calls(1024), quiet)), "idle load") == []


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
    assert (f"IQR {spread}" in lines[3]) is bool(spread)
    assert lines[3].endswith("!1") is bool(warnings)


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


def test_a_verdict_has_few_reasons_and_says_where_all_are() -> None:
    reasons = [f"reason {number}" for number in range(10)]
    first, *lines = verdict_lines(document({}, {}, "NO VERDICT", *reasons)["ddpperf"])
    more = "2 more reasons: python -m ddpperf.report -o report.html lists them all"
    assert [first, *(line.strip() for line in lines[:-2])] == ["NO VERDICT: reason 0", *reasons[1:8], more]


WORSE = [
    found("", tests=[], control="delayed step", ratio=1.5, finding="undecided"),
    *(found("test_a"), found("test_b", ratio=1.3), found("test_c", ratio=1.4, finding="undecided")),
]


@pytest.mark.parametrize(
    ("status", "header", "command"),
    [
        ("PASS", {}, "python -m pytest perf/ --benchmark-compare"),
        ("PASS", {"compared_with": "0001_x.json"}, "python -m ddpperf.results.promote"),
        ("PASS", {"judged": {"rows": []}}, "python -m pytest perf/ --benchmark-save=NAME"),
        ("FAIL", {"judged": {"rows": WORSE}}, f"python -m pytest {FILE}test_b"),
        ("FAIL", {"outcomes": {"x.py::t": {"kind": "failed"}}}, "python -m pytest x.py::t"),
        ("NO VERDICT", {"compared_with": "0001_x.json"}, "--max-seconds 1200"),
        ("NO VERDICT", {}, "then run this again: python -m pytest perf/"),
        ("NO VERDICT", {"compared_with": "0001_x.json", "advice": "free the GPUs"}, "free the GPUs"),
    ],
)
def test_verdict_ends_with_the_next_command(status: str, header: Json, command: str) -> None:
    verdict = {"status": status, "reasons": ["why"], "advice": header.pop("advice", "")}
    lines = verdict_lines({"verdict": verdict, "outcomes": {}, "environment": {}, **header})
    assert lines[0] == f"{status}: why"
    assert lines[1].startswith(" " * (len(status) + 2) + "next: ")
    assert command in " ".join(line.strip() for line in lines[1:])
    assert not any("python" in line for line in lines[1:-1]), "a command has a line of its own"


# --- wide tables


def baseline(name: str) -> Json:
    found: Json = read_document(REPOSITORY / "perf" / "baselines" / name)
    return found


def test_wide_table_joins_its_texts_and_keeps_the_efficiency() -> None:
    """What a run does by default stands in its first line, not in each row."""
    lines = summary_lines(baseline("h100-80gb-hbm3x4/0005_core.json"))
    start = next(place for place, line in enumerate(lines) if line.startswith("SCALING "))
    table = lines[start : lines.index("", start)]
    assert any("efficiency" in line for line in table[:5])
    assert table[0].endswith("ddp+avg+view+no_buffer_sync unless named")
    assert not any("no_buffer_sync" in line or "resnet18_cifar" in line for line in table[1:])
    (line,) = [line for line in table if line.startswith("weak       4  512 per rank  ")]
    assert re.fullmatch(r"weak +4 +512 per rank +[\d.]+ +\d% +[\d.]+ +3\.\d\dx ± 0\.0\d +9\d\.\d%", line)


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_narrow_terminal_cuts_no_efficiency(width: int) -> None:
    run = baseline("h100-80gb-hbm3x4/0005_core.json")
    lines = summary_lines(run, width=width)
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    text = "\n".join(lines)
    for test in run["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if test["name"].startswith(("test_weak", "test_strong")) and "efficiency" in metrics:
            assert f"{metrics['efficiency']['value']:.1%}" in text


def test_speedup_has_an_error_and_what_it_compares_with() -> None:
    """The reference is shown if it is no time of the table; a speedup within its error is not shown."""
    ddp = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
    rounds = {"a": (0.10, 0.11, 0.12, 0.13), "b": (0.2, 0.2, 0.2, 0.2), "c": (0.1, 0.1, 0.1, 0.1)}
    tests = {}
    hooks: tuple[tuple[CommHook, str, float], ...] = (
        ("bf16", "a", 0.2 / 0.115),
        ("avg", "b", 1.0),
        ("fp16", "c", 2.02),
    )
    for hook, name, speedup in hooks:
        spec = dataclasses.replace(ddp, comm_hook=hook)
        tests[f"test_strategies[{name}]"] = stored(
            *rounds[name], spec=spec, metrics={"speedup_over_ddp": speedup}
        )
        tests[f"test_strategies[{name}]"]["references"] = {"ddp": stored(*rounds["b"], spec=ddp)}
    (table,) = tables_of(passed(**tests))
    columns = {column.heading: column.cells for column in table.figures}
    assert columns["speedup over DDP"] == ("1.74x ± 0.21", "none shown ± 0.01", "2.02x ± 0.02")
    assert columns["DDP"] == ("200.0", "200.0", "202.0"), "the last one was faster than another 200 ms"
    del tests["test_strategies[c]"]
    (table,) = tables_of(passed(**tests))
    assert "DDP" not in [column.heading for column in table.figures]


def test_weak_scaling_stands_beside_the_time_of_one_device() -> None:
    """For as many images: t(1) = 1.5 * 0.2 s / 2. Few rounds have no error."""
    two, one = (
        TrainingSpec(world_size=N, per_rank_batch_size=2, strategy=strategy) for N, strategy in WORLDS
    )
    for rounds, speedup in ((4, "1.50x ± 0.01"), (2, "1.50x")):
        tests = {
            f"test_weak_scaling[{number}]": stored(
                *[0.2 + number] * rounds, spec=two, metrics={"speedup": 1.5, "efficiency": 0.75}
            )
            | {"references": {"one_device": stored(*[0.15] * 4, spec=one)}}
            for number in (0, 1)
        }
        (table,) = tables_of(passed(**tests))
        columns = {column.heading: column.cells for column in table.figures}
        assert columns["1 GPU"] == ("150.0", "900.0")
        assert f"speedup {speedup}" in table.common


@pytest.mark.parametrize(
    ("other", "shown"), [("ddp", "Lowest"), ("data_parallel", "Lowest efficiency without")]
)
def test_lowest_efficiency_is_that_of_ddp(other: Strategy, shown: str) -> None:
    tests = {}
    for strategy, efficiency in zip(("ddp", other), (0.8, 0.2 if other != "ddp" else 0.9), strict=True):
        spec = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy=strategy)
        metrics = {"speedup": 2 * efficiency, "efficiency": efficiency}
        tests[f"test_weak_scaling[{efficiency}]"] = stored(0.1, spec=spec, metrics=metrics)
    (line,) = [line for line in summary_lines(passed(**tests)) if "Lowest" in line]
    assert line.startswith(shown)
    assert "80.0%" in line
    assert ("without DataParallel" in line) is (other == "data_parallel")


def test_exposed_communication_is_one_range() -> None:
    spec = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
    by = {"exposed_comm_seconds": 0.003, "traced_exposed_comm_seconds": 0.002}
    negative = by | {"exposed_comm_seconds": -0.001}
    tests = {
        f"test_comm_split[{number}]": stored(
            *[0.01] * 4,
            spec=dataclasses.replace(spec, model=("resnet18", "resnet10_cifar")[number]),
            metrics=found,
        )
        for number, found in enumerate((by, negative))
    }
    (table,) = tables_of(passed(**tests))
    columns = {column.heading: column.cells for column in table.figures}
    assert columns["exposed"] == ("2.000 to 3.000", "0 to 2.000")


def test_reasons_of_skips_that_nobody_can_act_on_are_a_count() -> None:
    run = baseline("cpu2-epyc-25-17-1/0014_core.json")
    reasons = ["pass --full to run it"] * 2 + ["no GPU"] * 2 + ["no"]
    run["ddpperf"]["outcomes"] |= {
        f"{FILE}{number}": {"kind": "skipped", "reason": reason} for number, reason in enumerate(reasons)
    }
    lines = labelled(summary_lines(run, verbose=False), "skipped")
    assert "pass --full to run it: 2 tests" in lines
    assert lines[-1] == "8 tests for 6 other reasons: -rs says why", "5 for 4 of the stored run, and 3"


def test_brief_table_has_evenly_chosen_usual_rows() -> None:
    sizes = [2**power for power in range(10, 21)]
    slow = stored(*[0.1] * 4, spec=AllReduceSpec(world_size=2, nbytes=1024, algorithm="ring"))
    (table,) = tables_of(calls(*sizes, **{"test_all_reduce[ring]": slow}))
    brief = table.brief(6)
    assert brief.properties[0].cells == ("1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB")
    assert "nccl" in brief.common
    assert table.brief(12).tests == table.tests


def test_parts_of_a_step_and_other_add_up() -> None:
    (table,) = (
        table
        for table in tables_of(baseline("cpu2-epyc-25-17-1/0014_core.json"))
        if table.title == "step breakdown"
    )
    scale = {"us": 1e-3, "ms": 1.0}
    names = ("data", "forward", "backward", "gradient sync", "optimizer", "other")
    for place in range(len(table.tests)):
        cells = {column.heading: (column.cells[place], column.unit) for column in table.figures}
        parts = [found for name, found in cells.items() if name in names and found[0] != "-"]
        assert sum(float(text) * scale[unit] for text, unit in parts) == pytest.approx(
            float(cells["step"][0]), rel=1e-3
        )
