"""A run with canned measurements: it is saved, compared and told as a run on real ranks is."""

from __future__ import annotations

import os
import sys

from ddpperf.specs import AllReduceSpec
from tests.canned import CannedSuite

KILLED = """
from ddpperf.specs import AllReduceSpec, Fault

def test_killed(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind="kill", rank=1)))
"""


def test_canned_run_is_saved_and_passes(canned_suite: CannedSuite) -> None:
    before, modules = dict(os.environ), set(sys.modules)
    run = canned_suite.run()
    assert run.status == 0, run
    assert "PASS: 1 test measured" in run.output
    (sample,) = canned_suite.measured()["test_all_reduce"]["samples"]
    assert [len(ranks) for ranks in sample["seconds"]] == [2, 2, 2]
    assert dict(os.environ) == before
    assert not {name for name in set(sys.modules) - modules if "test_it" in name}


def test_canned_slow_down_shows_in_the_next_run(canned_suite: CannedSuite) -> None:
    """A small call on a CPU is for information, so it fails no run."""
    assert canned_suite.run("perf").status == 0
    canned_suite.canned.seconds = lambda spec, name: 0.1 if isinstance(spec, AllReduceSpec) else 0.01
    run = canned_suite.run("perf", "--benchmark-compare")
    (row,) = (line for line in run.sentences if line.startswith("COLLECTIVES "))
    assert ", for information" in row
    assert float(row.split(" ratio ")[1].partition(",")[0]) > 100


def test_canned_fault_fails_its_test(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(KILLED)
    run = canned_suite.run()
    assert run.status == 1, run
    run.assert_one_sentence(1, "test_killed failed: rank 1 of set A1 was killed by SIGKILL (at sample)")
