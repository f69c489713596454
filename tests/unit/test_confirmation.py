"""A comparison with a stored run, which measures what is left open A/B with the stored run's code.

The only process set of the run's own measurement is A1. The first A/B measurement has the sets 2 to 5, and
the repeats have later ones. A sets run the stored code then, and B sets the candidate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpperf.machine.compiler import CACHE_VARIABLE
from ddpperf.machine.cores import Plan
from ddpperf.plugin.judge import Judge
from ddpperf.specs import AllReduceSpec, CopySpec, Spec, TrainingSpec
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.canned import CannedSuite, died, step_seconds
from tests.project import Finished, git

STEPS = """
import pytest
from ddpperf.specs import AllReduceSpec

def steps(options):
    for batch in (8, 16):
        yield options.step(world_size=2, per_rank_batch_size=batch)

@pytest.mark.specs(cases=steps)
def test_step(measure, spec):
    measure(spec)

def test_call(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""
SMALL, LARGE = "perf/test_it.py::test_step[2rank-b8]", "perf/test_it.py::test_step[2rank-b16]"
MORE = "\n@pytest.mark.specs(cases=steps)\ndef test_more(measure, spec):\n    measure(spec)\n"
OWN = "A1"  # the process set of the run's own measurement
CHANGED = "NO VERDICT: this machine or its environment changed: perf/test_it.py::test_step["
Seconds = Callable[[Spec, str], float]


@pytest.fixture
def suite(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedSuite]:
    """Return a git repository with a baseline of its only commit, whose base needs no trial."""
    canned_suite.experiment.write_text(STEPS)
    canned_suite.commit(monkeypatch)
    canned_suite.canned.seconds = paced()
    saved = canned_suite.run("perf", "--rounds", "4", "--benchmark-save=base")
    assert saved.status == 0, saved
    canned_suite.canned.sampled.clear()
    yield canned_suite
    assert len(git(canned_suite.root, "worktree", "list").splitlines()) == 1
    assert list(canned_suite.root.glob(".ddpperf/base/*")) == []


def paced(
    *, first: float = 1.0, base: float = 1.0, candidate: float = 1.0, images: int = 0, noise: float = 0.0
) -> Seconds:
    """Return seconds of training steps that are longer by a factor, in a pass or on a side.

    images: the only batch size whose steps are longer; 0 for all.
    noise: by which fraction one process set of a side is slower, and the next one faster.
    """

    def seconds(spec: Spec, name: str) -> float:
        factor = first if name == OWN else base if name.startswith("A") else candidate
        if not isinstance(spec, TrainingSpec) or images not in (0, spec.per_rank_batch_size):
            factor = 1.0
        number = int(name[1:])
        if name != OWN:
            factor *= 1 + noise * (1 if number % 4 in (2, 3) else -1)
        return step_seconds(spec, name) * factor * (1 + number % 3 / 1000)

    return seconds


def batch(spec: Spec) -> int:
    return spec.per_rank_batch_size if isinstance(spec, TrainingSpec) else 0


def compare(suite: CannedSuite, *arguments: str) -> Finished:
    return suite.run("perf", "-v", "--rounds", "4", *arguments, "--benchmark-compare")


def save_another(suite: CannedSuite, experiment: str) -> None:
    """Commit another experiment, and save its baseline."""
    suite.experiment.write_text(experiment)
    git(suite.root, "commit", "--quiet", "-a", "-m", "two")
    saved = suite.run("perf", "--rounds", "4", "--benchmark-save=more")
    assert saved.status == 0, saved


def change_baseline(suite: CannedSuite, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON document of the baseline in its place."""
    (path,) = suite.root.glob("perf/baselines/*/*.json")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# --- the answer


def test_identical_code_passes_with_what_it_excludes(suite: CannedSuite) -> None:
    finished = compare(suite)
    finished.assert_one_sentence(
        0,
        "PASS: 3 tests measured, nothing got slower than the code of 0001_base.json: half of 2 measurements",
        "on the CPU (tolerance 25%) exclude a slow-down of 0.",
        "timed steps per side",
    )
    assert suite.rows()["test_step[2rank-b8]", "time"]["stages"] == ["first"]


def test_slower_machine_alone_is_no_verdict(suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.canned.seconds = paced(first=1.5, base=1.5, candidate=1.5)
    finished = compare(suite)
    finished.assert_one_sentence(125, CHANGED, "differences: none was found")
    finished.assert_one_sentence(125, "next: find what else runs on this machine, or store a new baseline")
    monkeypatch.setitem(suite.environment, "OMP_NUM_THREADS", "7")
    finished = compare(suite)
    finished.assert_one_sentence(125, CHANGED, "OMP_NUM_THREADS was not set, is 7")
    finished.assert_one_sentence(125, "next: undo the differences")


def test_control_that_cannot_be_measured_is_no_verdict(suite: CannedSuite) -> None:
    def seconds(spec: Spec, name: str) -> float:
        if isinstance(spec, CopySpec) and name != OWN:
            raise died(name)
        return paced()(spec, name)

    suite.canned.seconds = seconds
    compare(suite).assert_one_sentence(125, "NO VERDICT: a control could not be measured: rank 0 of set ")


def test_noisy_test_is_no_changed_machine(suite: CannedSuite) -> None:
    """Its process sets differ too much to say that the stored code takes as long."""

    def noisy(spec: Spec, name: str) -> float:
        place = int(name[1:]) // 2 % 2 if name != OWN and batch(spec) == 8 else 0
        return paced(first=2.0, images=8)(spec, name) * (1 + place)

    suite.canned.seconds = noisy
    finished = compare(suite)
    finished.assert_one_sentence(125, f"NO VERDICT: 1 of 2 measurements is undecided, such as {SMALL}: its ")
    finished.assert_one_sentence(125, "next: end other programs on this machine")
    assert "machine or its environment changed" not in finished.output


def test_tests_of_one_pair_are_measured_once_and_fail_together(suite: CannedSuite) -> None:
    save_another(suite, STEPS + MORE)
    suite.canned.seconds = paced(first=1.5, candidate=1.5, images=8)
    also = "; other tests with this measurement: perf/test_it.py::test_more[2rank-b8]"
    finished = compare(suite)
    finished.assert_one_sentence(1, f"{SMALL} is worse: its time is 1.", also)
    for stage in suite.saved_runs()[-1]["ddpperf"]["judged"]["stages"]:
        assert len(stage["tests"]) == (2 if stage["stage"] == "first" else 1)
    assert "b16] is worse" not in finished.output


def test_ab_measurements_leave_references_out(suite: CannedSuite) -> None:
    reference = '    measure.reference("call", AllReduceSpec(world_size=2, nbytes=2**26))\n'
    save_another(suite, STEPS.replace("    measure(spec)\n", "    measure(spec)\n" + reference))
    sampled: list[str] = []

    def seconds(spec: Spec, name: str) -> float:
        if isinstance(spec, AllReduceSpec) and spec.nbytes == 2**26:
            sampled.append(name)
        return paced(first=1.5, candidate=1.5, images=8)(spec, name)

    suite.canned.seconds = seconds
    compare(suite).assert_one_sentence(1, f"FAIL: {SMALL} is worse: its time is 1.")
    assert set(sampled) == {OWN}


@pytest.mark.parametrize(
    ("arguments", "used"),
    [
        (["--benchmark-compare"], [[True], [False, False]]),
        (["--replicates=2"], [[False]]),
        ([f"--candidate={sys.executable}"], [[False, False]]),
    ],
)
def test_several_process_sets_do_not_share_compiled_steps(
    suite: CannedSuite, monkeypatch: pytest.MonkeyPatch, arguments: list[str], used: list[list[bool]]
) -> None:
    """With a cache of compiled steps, all process sets of a side would run the same choice of kernels."""
    cached: list[list[bool]] = []  # of the sides of each pool

    def recorded(options: SetOptions, **others: Any) -> Pool:
        cached.append([CACHE_VARIABLE in side.environment for side in others["sides"]])
        return Pool(options, **others)

    monkeypatch.setattr("ddpperf.plugin.session.Pool", recorded)
    monkeypatch.setattr("ddpperf.plugin.session.compiler_cache", lambda device: {CACHE_VARIABLE: device})
    suite.run("perf", *arguments)
    assert cached[: len(used)] == used


# --- the time


@pytest.mark.parametrize(
    ("base", "candidate", "status", "why"),
    [
        (1.0, 1.0, 0, "PASS"),
        (1.0, 1.5, 1, "is worse"),
        (1.5, 1.5, 125, "1 measurement left out, because no PASS was possible"),
    ],
)
def test_first_measurement_ends_early_only_if_the_machine_changed(
    suite: CannedSuite, monkeypatch: pytest.MonkeyPatch, base: float, candidate: float, status: int, why: str
) -> None:
    """Its last quarter has begun when the first of two pairs has been measured. Slower ones are all named."""

    def end(judge: Judge, fraction: float, least: float = 0.25) -> float:
        return time.monotonic() + (1000 if fraction == 1 else -1)

    monkeypatch.setattr(Judge, "_end", end)
    suite.canned.seconds = paced(first=candidate, base=base, candidate=candidate)
    compare(suite).assert_one_sentence(status, why)
    stages = suite.saved_runs()[-1]["ddpperf"]["judged"]["stages"]
    assert len(stages[0]["tests"]) == (1 if status == 125 else 2)


def test_changed_machine_is_reported_without_a_repeat(suite: CannedSuite) -> None:
    """There is time for one of two pairs. The stored code is as slow in it, and so probably in the other."""
    suite.canned.seconds = paced(first=1.5, base=1.5, candidate=1.5)
    finished = compare(suite, "--max-seconds", "2")
    finished.assert_one_sentence(125, CHANGED, "--max-seconds 2 left no time for 1 measurement")
    judged = suite.saved_runs()[-1]["ddpperf"]["judged"]
    assert [(stage["stage"], len(stage["tests"])) for stage in judged["stages"]] == [("first", 1)]


def test_process_sets_start_on_all_cores(suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    """During rounds, the controller has few cores, on which the imports of many ranks would take long."""
    allowed = os.sched_getaffinity(0)
    plan = Plan(controller=(min(allowed),), ranks=(tuple(allowed),) * 2)
    monkeypatch.setattr("ddpperf.machine.cores.share_cores", lambda *_: plan)
    begun = []

    def recorded(options: SetOptions, **others: Any) -> Pool:
        begun.append(os.sched_getaffinity(0))
        return Pool(options, **others)

    monkeypatch.setattr("ddpperf.plugin.session.Pool", recorded)
    compare(suite)
    assert begun == [allowed] * 2, "of the run itself and of the A/B measurement"


def test_comparison_ends_with_its_seconds(suite: CannedSuite) -> None:
    """At least one pair is measured A/B, and repeated. A mean of few steps clears nothing without that."""

    def slow(spec: Spec, name: str) -> float:
        time.sleep(0.02 if name != OWN and batch(spec) else 0)
        return paced(first=1.5, candidate=1.5, noise=0.3)(spec, name)

    suite.canned.seconds = slow
    finished = compare(suite, "--max-seconds", "2")
    finished.assert_one_sentence(125, "NO VERDICT: --max-seconds 2 left no time for ")
    finished.assert_one_sentence(125, "next: give it more time: --max-seconds 60")


@pytest.mark.parametrize("cleared", [False, True])
def test_more_bytes_than_the_stored_code_sends_fail(suite: CannedSuite, cleared: bool) -> None:
    """The times are equal, so that the stored run may clear them."""
    if cleared:
        (suite.root / "perf" / "thresholds.toml").write_text("[decision.cpu]\ncompare_tolerance = 2.0\n")
        suite.canned.seconds = lambda spec, name: step_seconds(spec, name) / 1000  # so many steps
    sent = '    measure.metric("communicated_bytes_per_epoch", measure(spec).counter("gradient_bytes"))\n'
    save_another(suite, STEPS.replace("    measure(spec)\n", sent))
    compare(suite).assert_one_sentence(0, "PASS: 3 tests measured")
    stages = [suite.rows()[f"test_step[2rank-b{size}]", "mean_time"]["stages"] for size in (8, 16)]
    assert (["stored run"] in stages) is cleared, "one of both is measured, for the control steps"
    suite.canned.set_counters = lambda spec, name: {
        "gradient_bytes": 2.0**27 if batch(spec) == 16 and (name == OWN or name[0] == "B") else 2.0**26
    }
    finished = compare(suite)
    finished.assert_one_sentence(1, "FAIL: ", "b16] is worse: its communicated_bytes_per_epoch is ")


MESSAGES = """
from ddpperf.specs import MessagesSpec

def test_messages(measure):
    ledger = measure(MessagesSpec(world_size=2, per_rank_batch_size=8, strategy="ddp"))
    for kind in ("gradients", "buffers"):
        if sent := ledger.counter(kind):
            measure.metric(f"{kind}_bytes", {sample.set: 0.0 for sample in ledger.samples} | sent)
"""


def test_message_of_a_new_kind_fails(suite: CannedSuite) -> None:
    """The stored run has no metric for what it did not send."""
    suite.canned.set_counters = lambda spec, name: {"gradients": 100.0}
    save_another(suite, STEPS + MESSAGES)
    suite.canned.set_counters = lambda spec, name: {
        "gradients": 100.0,
        "buffers": 1e9 if name == OWN or name[0] == "B" else 0.0,
    }
    words = "test_messages is worse: its buffers_bytes is 1000000000, the base's 0, measured again"
    compare(suite).assert_one_sentence(1, words)


def test_bytes_alone_are_no_verdict_on_times(suite: CannedSuite) -> None:
    suite.canned.set_counters = lambda spec, name: {"gradients": 100.0}
    save_another(suite, MESSAGES)
    finished = compare(suite)
    finished.assert_one_sentence(125, "NO VERDICT: the positive control was not measured: no test measures a")
    finished.assert_one_sentence(125, "next: run a test of a training step in the same run")


def test_bytes_stored_after_a_reference_can_fail(suite: CannedSuite) -> None:
    """A measurement of times alone skips a test's references, and so what follows them."""
    sent = """    step = measure(spec)
    measure.reference("call", AllReduceSpec(world_size=2, nbytes=2**26))
    measure.metric("communicated_bytes_per_epoch", step.counter("gradient_bytes"))
"""
    save_another(suite, STEPS.replace("    measure(spec)\n", sent))
    suite.canned.set_counters = lambda spec, name: {
        "gradient_bytes": 2.0**27 if batch(spec) == 16 and (name == OWN or name[0] == "B") else 2.0**26
    }
    compare(suite).assert_one_sentence(1, "FAIL: ", "b16] is worse: its communicated_bytes_per_epoch is ")


def test_margin_comes_from_the_command_line(suite: CannedSuite) -> None:
    suite.canned.seconds = paced(first=1.5, candidate=1.5)
    compare(suite, "--benchmark-compare-fail=median:20%").assert_one_sentence(1, "is worse: its time is 1.")
    wide = compare(suite, "--benchmark-compare-fail=median:60%")
    wide.assert_one_sentence(0, "(tolerance 120%) exclude a slow-down of 5")


def test_candidate_that_fails_in_a_repeat_fails_although_the_base_failed_before(suite: CannedSuite) -> None:
    pace = paced(noise=0.12)

    def seconds(spec: Spec, name: str) -> float:
        if batch(spec) == 8 and (name in ("A2", "A4") or (name[0] == "B" and int(name[1:]) > 5)):
            raise died(name)
        return pace(spec, name)

    suite.canned.seconds = seconds
    compare(suite).assert_one_sentence(1, f"FAIL: {SMALL} failed: the candidate's rank 0 of set B")


# --- without the stored run's code


@pytest.mark.parametrize(
    ("changed", "why", "advice"),
    [
        (
            {"commit": "123456789+"},
            "measured 123456789 with changes that were not committed",
            "commit your code, then store a new baseline with --benchmark-save=NAME",
        ),
        (
            {"commit": "nogit"},
            "does not say which commit it measured",
            "store a new baseline with --benchmark-save=NAME in a git repository",
        ),
        (
            {"executable": "/gone/bin/python"},
            "measured torch 2.12.0, and its interpreter /gone/bin/python is gone",
            "store a new baseline with --benchmark-save=NAME",
        ),
        ({"commit": "123456789"}, "cannot be checked out (fatal: invalid reference", "repair this, then run"),
    ],
)
def test_lost_code_is_no_verdict(suite: CannedSuite, changed: dict[str, str], why: str, advice: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["ddpperf"]["environment"].update(changed)
        for benchmark in document["benchmarks"] if "executable" in changed else ():
            for sample in benchmark["extra_info"]["ddpperf"]["samples"]:
                sample["torch"] = "2.12.0"

    change_baseline(suite, change)
    suite.canned.seconds = paced(first=3.0, images=8)
    words = "NO VERDICT: this run cannot be compared with the stored run's code, because "
    finished = compare(suite)
    finished.assert_one_sentence(125, words, why)
    finished.assert_one_sentence(125, f"next: {advice}")
    assert "is missing" not in finished.output
    assert suite.rows()["test_step[2rank-b8]", "time"]["stages"] == ["stored run"]


def test_wide_tolerance_is_cleared_by_the_stored_run_but_for_its_stalls(suite: CannedSuite) -> None:
    """The time alone may be decided without the stored code."""
    (suite.root / "perf" / "thresholds.toml").write_text("[decision.cpu]\ncompare_tolerance = 2.0\n")
    change_baseline(suite, lambda document: document["ddpperf"]["environment"].update(commit="nogit"))
    compare(suite).assert_one_sentence(125, "NO VERDICT: this run cannot be compared")
    rows = suite.rows()
    assert rows["test_step[2rank-b8]", "time"]["finding"] == "not worse"
    assert rows["test_step[2rank-b8]", "mean_time"]["finding"] == "undecided"


# --- other tests than the stored run's


def test_lost_test_voids_the_verdict(suite: CannedSuite) -> None:
    compare(suite, "--deselect", LARGE).assert_one_sentence(0, "PASS: 2 tests measured", "1 measurement on")
    suite.experiment.write_text(STEPS.replace("(8, 16)", "(8,)"))
    finished = compare(suite)
    finished.assert_one_sentence(125, f"NO VERDICT: {LARGE} is in 0001_base.json but was not measured")
    finished.assert_one_sentence(125, "next: run all tests of the stored run")


def test_new_test_is_reported(suite: CannedSuite) -> None:
    suite.experiment.write_text(STEPS.replace("(8, 16)", "(8, 16, 32)"))
    finished = compare(suite)
    finished.assert_one_sentence(0, "PASS: 4 tests measured", f"; 1 test new, such as {SMALL[:-2]}32]")
    finished.assert_one_sentence(0, "new, so compared with nothing: test_step[2rank-b32]")


# --- baselines that cannot be read


def test_what_cannot_be_compared_with_is_refused_at_the_start(suite: CannedSuite) -> None:
    refused = suite.run("perf", "--benchmark-compare=9999")
    refused.assert_one_sentence(4, "ERROR: ", "9999 is neither a file nor the number or name")
    assert suite.canned.sampled == []
    assert len(suite.saved_runs()) == 1


def test_comparison_of_new_tests_alone_is_no_verdict(suite: CannedSuite) -> None:
    (suite.root / "perf" / "test_new.py").write_text(STEPS)
    finished = suite.run("perf/test_new.py", "--rounds", "4", "--benchmark-compare=base")
    finished.assert_one_sentence(125, "NO VERDICT: no test has a metric that can be judged")


# --- interrupts


def interrupted(pace: Seconds, when: Callable[[Spec, str], bool]) -> Seconds:
    def seconds(spec: Spec, name: str) -> float:
        if when(spec, name):
            raise KeyboardInterrupt("SIGINT")
        return pace(spec, name)

    return seconds


@pytest.mark.parametrize(
    ("stage", "when"),
    [
        ("own", lambda spec, name: batch(spec) == 16),
        ("first", lambda spec, name: name != OWN and batch(spec) == 16),
    ],
)
def test_interrupted_comparison_keeps_what_was_measured(
    suite: CannedSuite, stage: str, when: Callable[[Spec, str], bool]
) -> None:
    suite.canned.seconds = interrupted(paced(first=1.5, candidate=1.5, noise=0.07), when)
    finished = compare(suite)
    finished.assert_one_sentence(125, "NO VERDICT: the run was interrupted by SIGINT")
    finished.assert_one_sentence(125, "next: run this again: python -m pytest")
    row = suite.rows()["test_step[2rank-b8]", "time"]
    assert row["stored_ratio"] == pytest.approx(1.5, abs=0.01)
    assert row["stages"] == (["stored run"] if stage == "own" else ["first"])
    stages = suite.saved_runs()[-1]["ddpperf"]["judged"]["stages"]
    assert [stored["stage"] for stored in stages] == row["stages"][stage == "own" :], "with their samples"
    assert "machine or its environment changed" not in finished.output
    assert "left no time" not in finished.output


def test_interrupt_between_passes_counts_no_set_twice(
    suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screening's process sets would otherwise confirm what they suspect."""
    close, interrupts = Pool.close, [KeyboardInterrupt("SIGINT")]

    def interrupted_close(pool: Pool) -> None:
        close(pool)
        if pool.sets_made > 1 and interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(Pool, "close", interrupted_close)
    suite.canned.seconds = paced(first=1.5, candidate=1.5, noise=0.07)
    finished = compare(suite)
    finished.assert_one_sentence(125, "NO VERDICT: the run was interrupted by SIGINT")
    assert suite.rows()["test_step[2rank-b8]", "time"]["stages"] == ["first"]
