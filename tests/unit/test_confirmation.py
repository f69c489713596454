"""A comparison with a stored run, which measures its tests again in an A/B run with the stored run's code.

In the first pass of a run the only process set is A1. In later passes A2, A3 and so on run the
stored code, and B4, B5 and so on the candidate.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpperf.machine.compiler import CACHE_VARIABLE
from ddpperf.specs import AllReduceSpec, CopySpec, Spec, TrainingSpec
from ddpperf.workers.interpreter import Found
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
FIRST = "A1"  # the process set of the first pass
CHANGED = "NO VERDICT: this machine or its environment changed: perf/test_it.py::test_step["
TORCH = "2.11.0"
Seconds = Callable[[Spec, str], float]


@pytest.fixture
def suite(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedSuite]:
    """Return a git repository with a baseline of its only commit, whose base needs no trial."""
    found = Found(python="", torch=TORCH, torchvision=True)
    monkeypatch.setattr("ddpperf.plugin.base_checkout.check_side", lambda *_: found)
    monkeypatch.setattr("ddpperf.plugin.base_checkout.version", lambda _: TORCH)
    canned_suite.experiment.write_text(STEPS)
    (canned_suite.root / ".gitignore").write_text(".ddpperf/\n")
    git(canned_suite.root, "init", "--quiet")
    git(canned_suite.root, "add", ".")
    git(canned_suite.root, "commit", "--quiet", "-m", "one")
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
        factor = first if name == FIRST else base if name.startswith("A") else candidate
        if not isinstance(spec, TrainingSpec) or images not in (0, spec.per_rank_batch_size):
            factor = 1.0
        number = int(name[1:])
        if name != FIRST:
            factor *= 1 + noise * (1 if number % 4 in (2, 3) else -1)
        return step_seconds(spec, name) * factor * (1 + number % 3 / 1000)

    return seconds


def batch(spec: Spec) -> int:
    return spec.per_rank_batch_size if isinstance(spec, TrainingSpec) else 0


def small_slowest(pace: Seconds) -> Seconds:
    """Return seconds with which SMALL has the largest change, so that it is measured again first."""
    return lambda spec, name: pace(spec, name) * (1.3 if name.startswith("B") and batch(spec) == 8 else 1.0)


def compare(suite: CannedSuite, *arguments: str) -> Finished:
    return suite.run("perf", "--rounds", "4", *arguments, "--benchmark-compare")


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


def test_identical_code_passes_with_its_sensitivity(suite: CannedSuite) -> None:
    finished = compare(suite)
    finished.assert_one_sentence(
        0,
        "PASS: 3 tests measured, compared with the code of 0001_base.json: half of the 2 judged tests would",
        "95% of them ",
        "; 1 test for information only",
    )


def test_slower_candidate_fails_and_is_named(suite: CannedSuite) -> None:
    suite.canned.seconds = paced(first=1.5, candidate=1.5, images=8)
    finished = compare(suite)
    finished.assert_one_sentence(1, f"FAIL: {SMALL} is worse: its time is 1.")
    assert f"{LARGE} is worse" not in finished.output
    assert not any(int(name[1:]) > 5 for name in suite.canned.sampled), "no later measurement is needed"


def test_slower_machine_alone_is_no_verdict(suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.canned.seconds = paced(first=1.5, base=1.5, candidate=1.5)
    compare(suite).assert_one_sentence(125, CHANGED, "differences: none was found")
    assert any(int(name[1:]) > 5 for name in suite.canned.sampled), "the contradiction is measured again"
    monkeypatch.setitem(suite.environment, "OMP_NUM_THREADS", "7")
    compare(suite).assert_one_sentence(125, CHANGED, "OMP_NUM_THREADS was not set, is 7")


def test_failed_control_of_the_confirmation_is_no_verdict(suite: CannedSuite) -> None:
    def seconds(spec: Spec, name: str) -> float:
        if isinstance(spec, CopySpec) and name != FIRST:
            raise died(name)
        return paced()(spec, name)

    suite.canned.seconds = seconds
    compare(suite).assert_one_sentence(125, "NO VERDICT: a control could not be measured: rank 0 of set ")


def test_undecided_test_is_no_changed_machine(suite: CannedSuite) -> None:
    """Its process sets differ too much to say that the stored code takes as long."""

    def noisy(spec: Spec, name: str) -> float:
        places = {8: 1 + 0.4 * (int(name[1:]) % 4)} if name != FIRST else {}
        return paced(first=1.5, images=8)(spec, name) * places.get(batch(spec), 1.0)

    suite.canned.seconds = noisy
    finished = compare(suite)
    finished.assert_one_sentence(
        125, f"{SMALL} is slower: 1.50 ", "and the comparison with the stored run's code is undecided"
    )
    assert "machine or its environment changed" not in finished.output


def test_tests_of_equal_work_fail_together(suite: CannedSuite) -> None:
    save_another(suite, STEPS + MORE)
    suite.canned.seconds = paced(first=1.5, candidate=1.5, images=8)
    also = "; the same measurement is that of perf/test_it.py::test_more[2rank-b8]"
    finished = compare(suite)
    finished.assert_one_sentence(1, f"{SMALL} is worse: its time is 1.", also)
    assert "b16] is worse" not in finished.output


def test_confirmation_measures_no_references(suite: CannedSuite) -> None:
    reference = '    measure.reference("call", AllReduceSpec(world_size=2, nbytes=2**26))\n'
    save_another(suite, STEPS.replace("    measure(spec)\n", "    measure(spec)\n" + reference))
    sampled: list[str] = []

    def seconds(spec: Spec, name: str) -> float:
        if isinstance(spec, AllReduceSpec) and spec.nbytes == 2**26:
            sampled.append(name)
        return paced(first=1.5, candidate=1.5, images=8)(spec, name)

    suite.canned.seconds = seconds
    compare(suite).assert_one_sentence(1, f"FAIL: {SMALL} is worse: its time is 1.")
    assert set(sampled) == {FIRST}


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


def test_confirmation_ends_with_its_seconds(suite: CannedSuite) -> None:
    def slow(spec: Spec, name: str) -> float:
        if name != FIRST and isinstance(spec, TrainingSpec):
            time.sleep(0.02)
        return paced()(spec, name)

    suite.canned.seconds = slow
    finished = compare(suite, "--max-seconds", "0.2")
    finished.assert_one_sentence(
        125,
        "NO VERDICT: 1 of 2 tests would not have shown a slow-down as large as their tolerance",
        "--max-seconds 0 left no time for 1 measurement",
    )


def test_late_suspect_is_not_called_worse(suite: CannedSuite) -> None:
    """Without a later measurement of its own it may be the machine."""
    pace = small_slowest(paced(first=1.5, candidate=1.5, noise=0.07))

    def slow(spec: Spec, name: str) -> float:
        if int(name[1:]) > 5:  # a later measurement
            time.sleep(0.05)
        return pace(spec, name)

    suite.canned.seconds = slow
    finished = compare(suite, "--max-seconds", "2")
    finished.assert_one_sentence(
        1, f"FAIL: {SMALL} is worse: its time is 1.", "measured again on new process sets"
    )
    assert f"{LARGE} is worse" not in finished.output


# --- without the stored run's code


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"commit": "123456789+"}, "measured 123456789 with changes that were not committed"),
        ({"commit": "nogit"}, "does not say which commit it measured"),
        (
            {"executable": "/gone/bin/python"},
            "measured torch 2.12.0, and its interpreter /gone/bin/python",
        ),
    ],
)
def test_lost_code_cannot_be_confirmed(suite: CannedSuite, changed: dict[str, str], why: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["ddpperf"]["environment"].update(changed)
        for benchmark in document["benchmarks"] if "executable" in changed else ():
            for sample in benchmark["extra_info"]["ddpperf"]["samples"]:
                sample["torch"] = "2.12.0"

    change_baseline(suite, change)
    words = "NO VERDICT: 2 of 2 tests would not have shown a slow-down as large as their tolerance"
    since = f"cannot be compared with the stored run's code, because 0001_base.json {why}"
    compare(suite).assert_one_sentence(125, words, since)


def test_strict_limit_fails_without_stored_code(suite: CannedSuite) -> None:
    change_baseline(suite, lambda document: document["ddpperf"]["environment"].update(commit="nogit"))
    suite.canned.seconds = paced(first=3.0, images=8)
    finished = compare(suite)
    finished.assert_one_sentence(1, f"FAIL: {SMALL} is slower: 3.00 times its step in 0001_base.json, limit")
    assert f"{LARGE} is slower" not in finished.output


# --- other tests than the stored run's


def test_lost_test_voids_the_verdict(suite: CannedSuite) -> None:
    compare(suite, "--deselect", LARGE).assert_one_sentence(0, "PASS: 2 tests measured", "1 judged test")
    suite.experiment.write_text(STEPS.replace("(8, 16)", "(8,)"))
    finished = compare(suite)
    finished.assert_one_sentence(125, f"NO VERDICT: {LARGE} is in 0001_base.json but was not measured")


# --- baselines that cannot be read


@pytest.mark.parametrize(
    ("name", "why"),
    [("9999", "is neither a file nor the number or name"), ("bad.json", "cannot be read (NaN")],
)
def test_what_cannot_be_compared_with_is_refused_at_the_start(
    suite: CannedSuite, name: str, why: str
) -> None:
    (suite.root / "bad.json").write_text('{"ddpperf": {"schema": 2}, "mean": NaN}')
    suite.run("perf", f"--benchmark-compare={name}").assert_one_sentence(4, "ERROR: ", f"{name} {why}")
    assert suite.canned.sampled == []
    assert len(suite.saved_runs()) == 1


def test_comparison_of_new_tests_alone_is_no_verdict(suite: CannedSuite) -> None:
    (suite.root / "perf" / "test_new.py").write_text(STEPS)
    finished = suite.run("perf/test_new.py", "--rounds", "4", "--benchmark-compare=base")
    words = "NO VERDICT: no test of 0001_base.json was measured whose time can be judged on this machine"
    finished.assert_one_sentence(125, words)


# --- interrupts


def interrupted(pace: Seconds, when: Callable[[Spec, str], bool]) -> Seconds:
    def seconds(spec: Spec, name: str) -> float:
        if when(spec, name):
            raise KeyboardInterrupt("SIGINT")
        return pace(spec, name)

    return seconds


def test_interrupted_confirmation_is_no_verdict(suite: CannedSuite) -> None:
    suite.canned.seconds = interrupted(
        paced(first=1.5, candidate=1.5, noise=0.07), lambda spec, name: name != FIRST and batch(spec) == 16
    )
    finished = compare(suite)
    finished.assert_one_sentence(125, "NO VERDICT: the run was interrupted by SIGINT")
    finished.assert_one_sentence(125, f"{SMALL} could not be measured again, with time 1.")
    finished.assert_one_sentence(
        125, f"{LARGE} is slower: ", "and was not compared with the stored run's code: the run"
    )
    assert "machine or its environment changed" not in finished.output
    assert "FAIL" not in finished.output


def test_interrupt_keeps_what_was_decided(suite: CannedSuite) -> None:
    """SMALL has the larger change, so it is measured again first. LARGE is interrupted.

    The first pass has 1 set, the screening 4, so process sets above 5 are a later look's.
    """
    suite.canned.seconds = interrupted(
        small_slowest(paced(first=1.5, candidate=1.5, noise=0.07)),
        lambda spec, name: int(name[1:]) > 5 and batch(spec) == 16,
    )
    finished = compare(suite)
    finished.assert_one_sentence(
        1, f"FAIL: {SMALL} is worse: its time is 1.", "measured again on new process sets"
    )
    assert f"{LARGE} is worse" not in finished.output


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
    finished.assert_one_sentence(125, f"{SMALL} could not be measured again, with time 1.")
