"""The history of tests over stored runs: changes of their times, and what the lines say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddpperf.history import __main__ as command
from ddpperf.history.changes import LEAST_RUNS, changes, partition, without_spikes
from ddpperf.history.past_runs import past_runs
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import SCHEMA, Storage
from ddpperf.specs import AllReduceSpec
from tests.canned import CannedSuite
from tests.generated import BOUNDED

KEY = "h200x4"
NIGHTS, STEP, SIGMA = 40, 20, 0.005
Series = NDArray[np.float64]


# --- changes


def all_partitions(count: int, begin: int = 0) -> Iterator[list[int]]:
    """Yield where levels begin, for all partitions into levels of at least LEAST_RUNS."""
    yield []
    for place in range(begin + LEAST_RUNS, count - LEAST_RUNS + 1):
        for later in all_partitions(count, place):
            yield [place, *later]


@BOUNDED
@given(st.lists(st.floats(-9, 9), min_size=LEAST_RUNS, max_size=13), st.floats(0.1, 30))
def test_partition_is_the_best_of_all(values: list[float], penalty: float) -> None:
    def cost(begins: Sequence[int]) -> float:
        ends = [0, *begins, len(values)]
        levels = [np.array(values[first:last]) for first, last in pairwise(ends)]
        return float(sum(((level - level.mean()) ** 2).sum() + penalty for level in levels))

    found = partition(np.array(values), penalty)
    assert cost(found) == pytest.approx(min(map(cost, all_partitions(len(values)))))


def test_spike_is_no_level() -> None:
    logs = [0.0, 0.02, 0.0, 0.5, 0.02, 0.0, 0.02, 0.3]
    assert list(without_spikes(logs, 0.01)) == [0.0, 0.02, 0.0, 0.02, 0.02, 0.0, 0.02, 0.02]


def test_change_has_its_size_and_error() -> None:
    (found,) = changes([0.0, 0.001] * 5 + [0.03, 0.031] * 5, 0.001, tests=1)
    assert found.place == 10
    assert found.size == pytest.approx(0.03)
    assert 0.0003 < found.error < 0.0006


def nights(generator: np.random.Generator, step: float, *, alike: float, spikes: float) -> Series:
    """Simulate log times. alike: their autocorrelation. spikes: the fraction of nights with one."""
    noise = generator.normal(0, SIGMA, NIGHTS)
    for night in range(1, NIGHTS):
        noise[night] = alike * noise[night - 1] + noise[night] * math.sqrt(1 - alike**2)
    spiked = generator.random(NIGHTS) < spikes
    noise += spiked * generator.choice([-1, 1], NIGHTS) * generator.uniform(0.03, 0.1, NIGHTS)
    noise[STEP:] += step
    return noise


@pytest.mark.parametrize(
    ("alike", "spikes", "most_false", "least_found"),
    [(0.0, 0.0, 0.02, 0.99), (0.4, 0.0, 0.15, 0.98), (0.0, 0.05, 0.04, 0.97)],
    ids=["independent", "autocorrelated", "spikes"],
)
def test_rates_of_simulated_histories(
    alike: float, spikes: float, most_false: float, least_found: float
) -> None:
    """200 series of 40 nights. A step of 2% is found if it is known after three nights, within three."""
    generator, count = np.random.default_rng(52), 200
    false = found = 0
    for _ in range(count):
        steady = nights(generator, 0.0, alike=alike, spikes=spikes)
        false += bool(changes(list(steady), SIGMA, tests=1))
        stepped = nights(generator, 0.02, alike=alike, spikes=spikes)
        by_night = (changes(list(stepped[:end]), SIGMA, tests=1) for end in (STEP + 3, STEP + 4))
        found += any(abs(change.place - STEP) <= 3 for known in by_night for change in known)
    assert false / count <= most_false
    assert found / count >= least_found


# --- stored runs


def spec(nbytes: int) -> AllReduceSpec:
    return AllReduceSpec(world_size=2, nbytes=nbytes)


def run_of(seconds: dict[str, float], *, day: int = 1, nbytes: int = 1024, **header: Any) -> dict[str, Any]:
    """A run's document. header: more of its part "ddpperf"; `kinds` and `status` are its outcomes."""
    kinds = dict.fromkeys(seconds, "passed") | header.pop("kinds", {})
    environment = {"commit": f"{day:09}", "torch": "2.14.0", "driver": "1"} | header.pop("environment", {})
    tests = {}
    for test, value in seconds.items():
        sample = Sample(set="A1", side="A", torch="2.14.0", seconds=((value, value),))
        tests[test] = Measured(spec=spec(nbytes), iterations=1, samples=(sample,))
    return {
        "benchmarks": [
            {"fullname": test, "extra_info": {"ddpperf": one.to_json()}} for test, one in tests.items()
        ],
        "ddpperf": {
            "schema": SCHEMA,
            "hardware_key": KEY,
            "environment": environment,
            "options": {"command_line": "perf/ --model m:f --benchmark-compare -k x"},
            "outcomes": {test: {"kind": kind, "reason": ""} for test, kind in kinds.items()},
            "verdict": {"status": header.pop("status", "PASS"), "reasons": []},
            "compared_with": "0001_x.json",
            **header,
        },
        "datetime": f"2026-10-{day:02}T02:17:00",
    }


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.chdir(tmp_path)
    return Storage(root=tmp_path, hardware_key=KEY)


def keep(folder: Path, *runs: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, 1):
        (folder / f"{number:04}_x.json").write_text(json.dumps(run))


Show = Callable[..., list[str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Show:
    """A function that runs `python -m ddpperf.history` with these arguments, and returns its lines."""

    def lines(*arguments: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["history", *arguments])
        assert command.main() == 0
        return capfdbinary.readouterr().out.decode().splitlines()

    return lines


def slower_from(day: int, days: int = 14, **others: float) -> list[dict[str, Any]]:
    """Runs of two tests, of which `perf/a.py::t` takes 5% longer from this day on."""
    runs = []
    for today in range(1, days + 1):
        seconds = {"perf/a.py::t": 0.1 * (1.05 if today >= day else 1) * (1 + today % 3 / 2000)}
        runs.append(run_of(seconds | others, day=today))
    return runs


def test_change_names_its_runs_and_the_command(storage: Storage, show: Show) -> None:
    runs = slower_from(9, u=0.2)
    runs[2]["ddpperf"]["environment"]["torch"] = "2.13.0"
    keep(storage.runs, *runs)
    assert show() == [
        "history of h200x4: 14 runs from 2026-10-01 to 2026-10-14",
        "2026-10-03  0002_x -> 0003_x: torch was 2.14.0, is 2.13.0",
        "2026-10-04  0003_x -> 0004_x: torch was 2.13.0, is 2.14.0",
        "",
        "▁▁▁▁▁▁▁▁██████  105.1 ms  perf/a.py::t",
        "    2026-10-09  +5.0% (+3.2% to +6.8%)  0008_x -> 0009_x",
        "        python -m ddpperf.bisect --good 000000008 --bad 000000009 perf/a.py::t --model m:f",
        "",
        "▁▁▁▁▁▁▁▁▁▁▁▁▁▁  200.0 ms  u",
    ]
    assert len(show("a.py")) == 7


@pytest.mark.parametrize(
    ("good", "bad", "line"),
    [
        ({"commit": "1234"}, {"commit": "1234", "torch": "2.15"}, "--good torch==2.14.0 --bad torch==2.15 "),
        ({"commit": "1234"}, {"commit": "1234"}, "with the same commit and torch, so the machine changed"),
        ({"commit": "1234+"}, {"commit": "5678"}, "a commit had changes that were not committed"),
    ],
)
def test_cause_follows_from_the_two_runs(
    storage: Storage, show: Show, good: dict[str, str], bad: dict[str, str], line: str
) -> None:
    runs = slower_from(9)
    for run, fields in ((runs[7], good), (runs[8], bad)):
        run["ddpperf"]["environment"] |= fields
    keep(storage.runs, *runs)
    assert line in show("perf/a.py::t")[-1]


def test_all_tests_moved_is_the_machine(storage: Storage, show: Show) -> None:
    tests = "tuvw"
    keep(
        storage.runs,
        *(run_of(dict.fromkeys(tests, 0.1 + 0.01 * (day > 6)), day=day) for day in range(1, 12)),
    )
    lines = show()
    assert "2026-10-07  0006_x -> 0007_x: all tests moved, so the machine changed" in lines
    assert sum("with all tests, so the machine changed" in line for line in lines) == len(tests)
    assert "bisect" not in "".join(lines)


def test_only_equal_work_is_compared(storage: Storage, show: Show) -> None:
    """A/B runs, failed tests and other specs are no nights; a test that missed a threshold is one."""
    runs = slower_from(99, days=8)
    missed = {"checks": [{"test": "perf/a.py::t", "held": False}]}
    slow = {"perf/a.py::t": 0.3}
    failed = {"perf/a.py::t": "failed"}
    keep(
        storage.runs,
        *runs,
        run_of(slow, day=9, kinds=failed),
        run_of(slow, day=10, compared_with=None, judged={}),
        run_of(slow, day=11, nbytes=4096),
        run_of({"perf/a.py::t": 0.1}, day=12, kinds=failed, thresholds=missed),
        "{",
    )
    keep(storage.baselines, runs[3])
    found, damaged = past_runs(storage)
    assert [run.day[-2:] for run in found] == [f"{day:02}" for day in (*range(1, 9), 11, 12)]
    assert [run.promoted for run in found].count(True) == 1
    assert damaged == ["0013_x.json"]
    lines = show()
    assert lines[1] == "left out, because they are damaged or of another machine: 0013_x.json"
    assert lines[-1].endswith("  100.0 ms  perf/a.py::t")
    assert not any("%" in line for line in lines)


def test_few_runs_are_one_sentence(storage: Storage, show: Show) -> None:
    keep(storage.runs, *slower_from(3, days=5))
    sentence = "5 comparable runs, and a history needs 6 that measured the same; run the suite each night"
    assert show()[1:] == [f"tests have at most {sentence}"]
    assert "tests named 'no' have at most 0 comparable runs, and" in show("no")[-1]


def test_without_runs_the_command_is_refused(storage: Storage, show: Show) -> None:
    assert "at most 0 comparable runs" in show()[1]


def test_drift_counts_baselines_and_passed_comparisons(storage: Storage) -> None:
    """Other runs may have the slower code that is to be found."""
    t = {"t": 0.1}
    keep(storage.baselines, run_of(t, day=2), run_of(t, day=1), "{")
    keep(
        storage.runs,
        run_of(t, day=2),  # it was promoted
        run_of(t, day=3),
        run_of(t, day=5, compared_with=None),
        run_of(t, day=6, status="FAIL"),
    )
    mine = storage.root / "mine.json"
    mine.write_text(json.dumps(run_of(t, day=7, status="FAIL")))
    found, _ = past_runs(storage, 8, [mine])
    accepted = [(run.day[-2:], run.promoted) for run in found if run.accepted]
    assert accepted == [("01", True), ("02", True), ("03", False), ("07", False)]


def test_a_bounded_number_of_files_is_read(storage: Storage) -> None:
    keep(storage.baselines, *(run_of({"t": 0.1}, day=day) for day in range(1, 31)))
    found, _ = past_runs(storage, 8)
    assert [int(run.day[-2:]) for run in found] == [*range(1, 6), *range(23, 31)]


def test_page_has_the_history(canned_suite: CannedSuite) -> None:
    for _ in range(6):
        canned_suite.run("perf")
    canned_suite.run("perf", "--report", "page.html")
    assert "7 runs from 20" in (canned_suite.root / "page.html").read_text()


def test_third_comparison_names_the_drift(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    canned_suite.commit(monkeypatch)
    canned_suite.run("perf", "--benchmark-save=first")
    canned_suite.run("perf", "--benchmark-compare")
    second = canned_suite.saved_runs()[-1]["ddpperf"]["judged"]["drifts"]
    canned_suite.run("perf", "--benchmark-compare")
    third = canned_suite.saved_runs()[-1]["ddpperf"]["judged"]["drifts"]
    assert (second, third) == ({}, {"perf/test_it.py::test_all_reduce": 0.0})
