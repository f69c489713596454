"""A/B runs with canned measurements: what each side measures, what fails, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpperf.machine.hardware import hardware_key
from ddpperf.results.samples import Measured
from ddpperf.specs import Spec
from ddpperf.verdict.estimates import Estimates, RowKey
from ddpperf.verdict.rows import Row, rows
from ddpperf.verdict.settings import Settings
from ddpperf.workers.interpreter import Found, Side
from ddpperf.workers.pool import Pool
from tests.canned import CannedSuite, died, step_counters, step_seconds
from tests.project import Finished

STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    step = measure(TrainingSpec(world_size=2, per_rank_batch_size=8, strategy="ddp"))
"""
SENT = '    measure.metric("communicated_bytes_per_epoch", step.counter("gradient_bytes"))\n'
SETTINGS = "[decision.cpu]\nfirst_sets = 3\nrepeat_sets = 3\n"
WIDE = "[decision.cpu]\nmargin = 0.9\ntolerance = 0.95\ncompare_tolerance = 0.95\nfirst_sets = 2\n"
WITH_BF16 = ("--candidate", "comm_hook=bf16")


@pytest.fixture
def project(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> CannedSuite:
    """Return a project whose runs take place in this process, and whose sides need no trial."""
    found = Found(python="", torch="2.11.0", torchvision=True)
    monkeypatch.setattr("ddpperf.plugin.options.refused_options.check_side", lambda *_: found)
    canned_suite.experiment.write_text(STEP)
    (canned_suite.root / "perf" / "thresholds.toml").write_text(SETTINGS)
    (canned_suite.root / "other").mkdir()
    return canned_suite


def run(project: CannedSuite, *arguments: str, rounds: str = "4") -> Finished:
    return project.run("perf", "-v", "--rounds", rounds, *arguments)


def slower(side: str, factor: float) -> Any:
    """Return step seconds that are longer on one side's training steps."""

    def seconds(spec: Spec, name: str) -> float:
        noise = 1 + int(name[1:]) % 3 / 1000
        longer = factor if name.startswith(side) and spec.measurement != "copy" else 1
        return step_seconds(spec, name) * longer * noise

    return seconds


def by_hook(spec: Spec, rank: int) -> dict[str, float]:
    """Return counters that say that bf16 sends half as many bytes."""
    sent = 2.0**13 if getattr(spec, "comm_hook", "") == "bf16" else 2.0**14
    return step_counters(spec, rank) | {"gradient_bytes": sent}


def by_side(base: float, candidate: float) -> Any:
    """Return a counter of all ranks by the spec of the side, which has bf16 as the candidate."""
    return lambda spec: candidate if getattr(spec, "comm_hook", "") == "bf16" else base


def test_slower_candidate_fails_on_fresh_sets(project: CannedSuite) -> None:
    project.canned.seconds = slower("B", 1.6)
    finished = run(project, *WITH_BF16, "--junitxml", "junit.xml")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step is worse: its time is 1.")
    finished.assert_one_sentence(1, "measured again on new process sets")
    row = project.rows()["test_step", "time"]
    assert row["ratio"] == pytest.approx(1.6, abs=0.02)
    assert (row["finding"], row["certain"], row["stages"]) == ("worse", True, ["first", "repeat"])
    (document,) = project.saved_runs()
    first = document["benchmarks"][0]["extra_info"]["ddpperf"]
    (stage,) = document["ddpperf"]["judged"]["stages"]
    assert stage["stage"] == "repeat"
    (again,) = stage["tests"].values()
    sets = [{sample["set"] for sample in stored["samples"]} for stored in (first, again)]
    assert [len(names) for names in sets] == [6, 6]
    assert not sets[0] & sets[1]
    assert "is worse: its time is 1." in (project.root / "junit.xml").read_text()


def test_rare_stalls_fail(project: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth round of the candidate takes twice as long, so that only the mean grows."""
    usual = project.canned.round_seconds

    def stalling(spec: Spec, name: str, rank: int, number: int) -> float:
        is_stall = name.startswith("B") and spec.measurement != "copy" and number % 5 == 0
        return usual(spec, name, rank, number) * (2 if is_stall else 1)

    monkeypatch.setattr(project.canned, "round_seconds", stalling)
    finished = run(project, *WITH_BF16, rounds="5")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step is worse: its mean time is 1.2")
    assert project.rows()["test_step", "time"]["finding"] == "not worse"


@pytest.mark.parametrize(
    ("counter", "words"),
    [
        ("peak_memory_bytes", "its peak memory is 1.100 times the base's"),
        ("gradient_bytes", "its communicated_bytes_per_epoch is 1100000, the base's 1000000"),
    ],
)
def test_more_memory_or_bytes_fail(project: CannedSuite, counter: str, words: str) -> None:
    """The times are equal. What grew is measured twice."""
    project.experiment.write_text(STEP + SENT)
    project.canned.counters = lambda spec, rank: {
        **step_counters(spec, rank),
        counter: by_side(1e6, 1.1e6)(spec),
    }
    run(project, *WITH_BF16).assert_one_sentence(1, "FAIL: perf/test_it.py::test_step is worse: ", words)
    grown = [row for row in project.rows().values() if row["finding"] == "worse"]
    assert [row["stages"] for row in grown] == [["first", "repeat"]]


def test_busy_processes_of_the_candidate_fail(project: CannedSuite) -> None:
    """They take a core while their side is idle, so they slow the base, too."""
    project.canned.set_counters = lambda spec, name: {
        "idle_cpu_seconds": 5.0 if name.startswith("B") else 0.0,  # of each of two ranks
        "idle_seconds": 10.0,
    }
    words = "FAIL: the candidate is worse: between their rounds its processes keep 1.00 CPU cores busy"
    finished = run(project, *WITH_BF16)
    finished.assert_one_sentence(1, words)
    finished.assert_one_sentence(1, "next: find the thread or process that is busy between the rounds")


def test_base_that_is_slower_beside_the_candidate_is_no_verdict(
    project: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of the candidate's waiting processes slows both sides, such as a kernel on the GPU."""
    measure_base_alone, factors = Pool.measure_base_alone, [1.5]

    def alone(pool: Pool, like: Measured) -> Measured:
        factors.append(1.0)
        return measure_base_alone(pool, like)

    monkeypatch.setattr(Pool, "measure_base_alone", alone)
    project.canned.seconds = lambda spec, name: step_seconds(spec, name) * factors[-1]
    finished = run(project, *WITH_BF16)
    finished.assert_one_sentence(
        125, "NO VERDICT: a step of the base takes 1.50 times as long while the candidate's processes wait"
    )
    finished.assert_one_sentence(125, "next: find what runs while the candidate's processes wait")


def test_lost_delay_is_no_verdict(project: CannedSuite) -> None:
    """Half of the artificial delay does not show."""
    project.canned.seconds = lambda spec, name: slower("B", 1.0)(spec, name) - spec.delay_seconds / 2
    words = "NO VERDICT: the positive control failed: a step that was delayed by 16% takes 1.080 times"
    run(project, *WITH_BF16).assert_one_sentence(125, words)


def test_failed_copy_makes_no_slow_down_count(project: CannedSuite) -> None:
    project.canned.seconds = lambda spec, name: step_seconds(spec, name) * (1.5 if "B" in name else 1)
    words = "NO VERDICT: the negative control failed: a copy of memory, which no change can affect, takes 1.5"
    finished = run(project, *WITH_BF16)
    finished.assert_one_sentence(125, words)
    finished.assert_one_sentence(125, "test_step is worse: its time is 1.500 times the base's")


LACKED = """
import pytest
from ddpperf.specs import CustomStepSpec, TrainingSpec

SPECS = [TrainingSpec(world_size=1, per_rank_batch_size=8, strategy="single", model="torchvision:alexnet")]
SPECS += [CustomStepSpec(world_size=1, per_rank_batch_size=8, function=f) for f in ("new:f", "old:f")]

@pytest.mark.parametrize("spec", SPECS, ids=["images", "new", "old"])
def test_it(measure, spec):
    measure(spec)
"""


def test_tests_of_what_a_side_lacks_are_skipped(
    project: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side is tried once, with the functions that it must have."""
    tried: list[list[str]] = []

    def check(side: Side, requested: str, device: str, functions: list[str]) -> Found:
        tried.append(functions)
        return Found(python="", torch="2.11.0", torchvision=False)

    monkeypatch.setattr("ddpperf.plugin.options.refused_options.check_side", check)
    (project.root / "new.py").touch()
    project.experiment.write_text(LACKED)
    project.canned.seconds = lambda spec, name: 0.01
    run(project, "--candidate", "other")
    (document,) = project.saved_runs()
    outcomes = document["ddpperf"]["outcomes"]
    assert [outcome["kind"] for outcome in outcomes.values()] == ["skipped", "candidate cannot", "passed"]
    assert outcomes["perf/test_it.py::test_it[new]"]["reason"].startswith("the candidate lacks new:f")
    assert [functions[1:] for functions in tried] == [["old:f"]]


TWO_STEPS = """
import pytest
from ddpperf.specs import TrainingSpec

@pytest.mark.parametrize("batch", [8, 16])
def test_step(measure, batch):
    step = measure(TrainingSpec(world_size=2, per_rank_batch_size=batch, strategy="ddp"))
"""
NO_TIME = ("--max-seconds", "0.001")
FIRST_SETS = range(1, 7)  # of a run: three process sets of each side


def batch_of(spec: Spec) -> int:
    return getattr(spec, "per_rank_batch_size", 0)


def first_slower(factor: float, later: float) -> Any:
    """Return step seconds that are longer for the candidate, the most with batch size 16.

    later: the factor of batch size 16 in the repeated measurement.
    """

    def seconds(spec: Spec, name: str) -> float:
        longer = 1.3 if batch_of(spec) == 8 else factor if int(name[1:]) in FIRST_SETS else later
        return slower("B", longer)(spec, name)  # type: ignore[no-any-return]

    return seconds


def test_run_that_has_failed_ends_in_time(project: CannedSuite) -> None:
    """The test with the largest change is repeated, and is worse. That is enough for a FAIL."""
    project.experiment.write_text(TWO_STEPS)
    project.canned.seconds = first_slower(1.6, 1.6)
    finished = run(project, *WITH_BF16, *NO_TIME)
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step[16] is worse: its time is 1.")
    finished.assert_one_sentence(1, "FAIL: 2 of 2 measurements are worse, such as test_step[16] by +")
    other = project.rows()["test_step[8]", "time"]
    assert (other["finding"], other["stages"]) == ("worse", ["first"]), "certain by the other's repeat"


def test_second_repeat_does_not_begin_too_late(project: CannedSuite) -> None:
    """The test with the largest change is not worse when it is repeated, and no time is left."""
    project.experiment.write_text(TWO_STEPS)
    project.canned.seconds = first_slower(1.6, 1.0)
    finished = run(project, *WITH_BF16, *NO_TIME)
    finished.assert_one_sentence(125, "NO VERDICT: --max-seconds 0 left no time for ")
    assert project.rows()["test_step[16]", "time"]["finding"] != "worse"


def test_second_repeat_divides_its_level_by_all_tested_rows(
    project: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch size 16 looks worse at first, and is cleared. Batch size 8 is near its margin in all repeats."""
    tight = "[decision.cpu]\nfirst_sets = 3\nrepeat_sets = 3\nmargin = 0.01\ntolerance = 0.011\n"
    (project.root / "perf" / "thresholds.toml").write_text(tight)
    project.experiment.write_text(TWO_STEPS)
    tested: list[frozenset[RowKey]] = []

    def recorded(
        estimates: Sequence[Estimates], settings: Settings, keys: frozenset[RowKey] = frozenset()
    ) -> list[Row]:
        tested.append(keys)
        return rows(estimates, settings, keys)

    def seconds(spec: Spec, name: str) -> float:
        changed = 1.03 if int(name[1:]) in FIRST_SETS else 0.97
        factor = {8: 1.0107, 16: changed}.get(batch_of(spec), 1.0) if name.startswith("B") else 1.0
        return step_seconds(spec, name) * factor

    monkeypatch.setattr("ddpperf.plugin.judge.rows", recorded)
    project.canned.seconds = seconds
    run(project, *WITH_BF16)
    (document,) = project.saved_runs()
    repeated = [stage["tests"].keys() for stage in document["ddpperf"]["judged"]["stages"]]
    small, large = "perf/test_it.py::test_step[8]", "perf/test_it.py::test_step[16]"
    assert repeated == [{small, large}, {small}]
    found = {(batch_of(key.pair.base), key.metric) for key in tested[-1] if key.pair is not None}
    assert found == {(8, "time"), (8, "mean_time"), (16, "time"), (16, "mean_time")}


@pytest.mark.parametrize("stage", ["first", "controls", "repeat"])
def test_interrupted_run_keeps_what_was_measured(project: CannedSuite, stage: str) -> None:
    project.experiment.write_text(TWO_STEPS)

    def interrupted(spec: Spec, name: str) -> float:
        number, batch = int(name[1:]), batch_of(spec)
        at = {"first": batch == 16, "controls": not batch, "repeat": batch == 8 and number > 6}
        if at[stage]:
            raise KeyboardInterrupt("SIGINT")
        return first_slower(1.6, 1.6)(spec, name)  # type: ignore[no-any-return]

    project.canned.seconds = interrupted
    finished = run(project, *WITH_BF16)
    rows = project.rows()
    assert rows["test_step[8]", "time"]["ratio"] == pytest.approx(1.3, abs=0.01)
    assert "left no time" not in finished.output
    assert "not compared" not in finished.output
    if stage == "repeat":
        finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step[16] is worse: its time is 1.")
    else:
        finished.assert_one_sentence(125, "NO VERDICT: the run was interrupted by SIGINT")
        finished.assert_one_sentence(125, "next: run this again: python -m pytest")
        assert "is missing" not in finished.output


def test_equal_sides_pass_and_are_no_baseline(project: CannedSuite) -> None:
    project.canned.seconds = slower("B", 1.0)
    finished = run(project, *WITH_BF16, "--benchmark-save=same")
    assert finished.status == 0, finished
    assert "not saved as a baseline: an A/B run measures two versions of the code" in finished.output
    found = project.rows()
    assert found["test_step", "time"]["finding"] == "not worse"
    assert found["delayed step", "time"]["ratio"] == pytest.approx(1.16, abs=0.01), "by its tolerance"
    assert found["copy of memory", "time"]["ratio"] == pytest.approx(1, abs=0.01)
    assert found["base beside the candidate", "time"]["ratio"] == pytest.approx(1, abs=0.01)
    (benchmark,) = project.saved_runs()[-1]["benchmarks"]
    samples = benchmark["extra_info"]["ddpperf"]["samples"]
    assert sorted(sample["side"] for sample in samples) == ["A"] * 3 + ["B"] * 3
    assert len(benchmark["stats"]["data"]) == 3 * 4, "the printed time is that of one side"


def test_named_base_stands_for_the_stored_code(project: CannedSuite) -> None:
    assert run(project, "--benchmark-save=fast").status == 0
    project.canned.seconds = slower("", 1.5)
    same = run(project, "--base", "other", "--benchmark-compare=fast")
    changed = (
        "NO VERDICT: this machine or its environment changed: perf/test_it.py::test_step takes 1.50 times"
    )
    same.assert_one_sentence(125, changed, "the stored code is as slow today")
    assert project.rows()["test_step", "time"]["finding"] == "not worse"
    root = project.saved_runs()[-1]["ddpperf"]["judged"]["sides"]["base"]["root"]
    assert root == str(project.root / "other")


@pytest.mark.parametrize(
    ("side", "status", "words"),
    [
        ("B", 1, "FAIL: perf/test_it.py::test_step failed: the candidate's rank 0 of set B"),
        ("A", 125, "NO VERDICT: perf/test_it.py::test_step was not measured: the base's rank 0 of set A"),
    ],
)
def test_dying_rank_decides_by_its_side(project: CannedSuite, side: str, status: int, words: str) -> None:
    def dying(spec: Spec, name: str) -> float:
        if name.startswith(side):
            raise died(name)
        return step_seconds(spec, name)

    project.canned.seconds = dying
    run(project, *WITH_BF16).assert_one_sentence(status, words, "exited with status 7")


def test_candidate_has_its_own_spec(project: CannedSuite) -> None:
    project.experiment.write_text(STEP + SENT)
    (project.root / "perf" / "thresholds.toml").write_text(WIDE)
    project.canned.counters = by_hook
    finished = run(project, *WITH_BF16, "--candidate", "delay_seconds=0.0001", rounds="1")
    (stored,) = project.measured().values()
    assert stored["candidate_spec"]["comm_hook"] == "bf16", finished
    assert [stored[side].get("delay_seconds", 0) for side in ("spec", "candidate_spec")] == [0, 0.0001]
    sent = stored["metrics"]["communicated_bytes_per_epoch"]["by_set"]
    by_side = {sample["side"]: sent[sample["set"]] for sample in stored["samples"]}
    assert by_side["B"] == by_side["A"] / 2
    assert stored["metrics"]["communicated_bytes_per_epoch"]["value"] == by_side["B"]


def test_thresholds_hold_for_the_candidate(project: CannedSuite) -> None:
    """It sends half of what the base does."""
    sent = '{name: nbytes / 2**14 for name, nbytes in step.counter("gradient_bytes").items()}'
    project.experiment.write_text(f'{STEP}    measure.metric("speedup", {sent})\n')
    text = WIDE
    for hook, least in (("none", 0.9), ("bf16", 0.75)):
        text += f'[[threshold]]\nhardware = "{hardware_key("cpu", [])}"\ntest = "test_step"\n'
        text += f'where = {{ comm_hook = "{hook}" }}\nspeedup = {least}\n'
    (project.root / "perf" / "thresholds.toml").write_text(text)
    project.canned.counters = by_hook
    finished = run(project, *WITH_BF16, rounds="1")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step failed: speedup 0.50x is below 0.75x")
    assert "below 0.90x" not in finished.output, "which is of what the base measures"


@pytest.mark.parametrize(
    ("parts", "tests", "words"),
    [
        ([2], "1 skipped", "the candidate cannot measure it: static_graph=True needs acc"),
        ([1, 2], "1 passed, 1 skipped", "the candidate cannot measure 1 test, such as "),
    ],
)
def test_unmeasurable_candidate_is_no_verdict(
    project: CannedSuite, parts: list[int], tests: str, words: str
) -> None:
    project.experiment.write_text(
        "import pytest\nfrom ddpperf.plugin.cases import case\n\n"
        "def cases(options):\n"
        f"    for parts in {parts}:\n"
        "        step = options.step(world_size=2, per_rank_batch_size=8, accumulation_steps=parts)\n"
        "        yield case(step, gate=True)\n\n"
        "@pytest.mark.specs(cases=cases)\n"
        "def test_step(measure, spec):\n"
        "    measure(spec)\n"
    )
    (project.root / "perf" / "thresholds.toml").write_text(WIDE)
    finished = run(project, "-m", "gate", "--candidate", "static_graph=true", rounds="1")
    finished.assert_one_sentence(125, words)
    assert tests in finished.output


def test_wrong_root_is_refused(project: CannedSuite, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its thresholds and stored runs would be the other's."""
    other = tmp_path_factory.mktemp("other")
    (other / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (other / "mine.py").write_text("")
    finished = project.run("--candidate", str(other), "perf")
    sentence = (
        f"pytest took {other} for the root of this project, but {project.root / 'perf'} is outside; "
        "name the tests"
    )
    finished.assert_one_sentence(4, sentence)
    assert not (other / ".ddpperf").exists()


def test_base_with_another_torch_is_refused(project: CannedSuite) -> None:
    assert run(project, rounds="1").status == 0
    (path,) = project.root.glob(".ddpperf/runs/*/*.json")
    (sample,) = project.measured()["test_step"]["samples"]
    path.write_text(path.read_text().replace(f'"torch":"{sample["torch"]}"', '"torch":"2.11.9"'))
    finished = run(project, "--base", "other", "--benchmark-compare")
    finished.assert_one_sentence(
        4, f"{path.name} was measured with torch 2.11.9, but the base has {sample['torch']}; name"
    )
    assert len(project.saved_runs()) == 1
