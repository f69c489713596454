"""Faults and interrupts in a run of pytest: what the run reports, and that no process is left."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import time

import pytest

from tests.canned import CannedSuite
from tests.faults import PURPOSE
from tests.project import ALL_REDUCE, Project, wait_while_it_runs

FAULTS = """
import pytest
from ddpperf.specs import AllReduceSpec
from tests.faults import failing

KINDS = ["kill", "leave", "raises", "hang"]

@pytest.mark.parametrize("spec", map(failing, KINDS), ids=KINDS)
def test_fault(measure, spec):
    measure(spec)

def test_good(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""
HANGS = """
import pytest
from ddpperf.specs import AllReduceSpec
from tests.faults import failing

@pytest.mark.parametrize("spec", [failing("hang")])
def test_hang(measure, spec):
    measure(spec)

def test_never(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""


def start_until_fault(project: Project) -> subprocess.Popen[str]:
    """Start pytest, and return when rank 1 hangs."""
    process = project.start("perf", "--worker-logs", "logs")
    log = project.root / "logs" / "A1-rank1.log"
    wait_while_it_runs(process, lambda: log.exists() and PURPOSE in log.read_text(), "no round was begun")
    return process


def test_each_fault_is_an_outcome_with_its_cause(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(FAULTS)
    assert canned_suite.run("perf", "--deadline", "10").status == 1
    (saved,) = canned_suite.saved_runs()
    outcomes = {test.split("::")[1]: outcome for test, outcome in saved["ddpperf"]["outcomes"].items()}
    assert outcomes.pop("test_good")["kind"] == "passed"
    assert {outcome["kind"] for outcome in outcomes.values()} == {"failed"}
    assert {test: outcome["reason"] for test, outcome in outcomes.items()} == {
        "test_fault[kill]": "rank 1 of set A1 was killed by SIGKILL (at sample)",
        "test_fault[leave]": "rank 1 of set A2 exited with status 0 (at sample)",
        "test_fault[raises]": f"rank 1 of set A3 raised RuntimeError: {PURPOSE} (at sample)",
        "test_fault[hang]": "rank 1 of set A4 did not answer within 10 s (at sample)",
    }


@pytest.mark.slow
def test_interrupted_start_of_ranks_leaves_nothing(project: Project) -> None:
    process = project.start("perf")
    wait_while_it_runs(process, project.ranks, "no rank was started")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 125, output
    assert "NO VERDICT: the run was interrupted" in output
    project.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_model_check_is_no_verdict(project: Project, how: signal.Signals) -> None:
    (project.root / "slow.py").write_text(
        "import pathlib, time\ndef make():\n    pathlib.Path('begun').touch()\n    time.sleep(300)\n"
    )
    process = project.start("perf", "--model", "slow:make")
    wait_while_it_runs(process, (project.root / "begun").exists, "the model was not tried")
    process.send_signal(how)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 125, output
    assert f"NO VERDICT: the run was interrupted by {how.name}" in output
    project.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ids=["a time limit", "ctrl-c", "a lost connection"],
)
def test_interrupted_round_keeps_what_was_measured(project: Project, how: signal.Signals) -> None:
    project.experiment.write_text(ALL_REDUCE + HANGS)
    process = start_until_fault(project)
    process.send_signal(how)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 125, output
    assert f"NO VERDICT: the run was interrupted by {how.name}" in output
    assert re.search(r"perf/test_it\.py::test_never was not run", output)
    assert list(project.measured()) == ["test_all_reduce"]
    project.assert_nothing_left()


def test_nohup_run_survives_its_terminal(canned_suite: CannedSuite) -> None:
    (canned_suite.root / "conftest.py").write_text(
        "import os, signal\n"
        'pytest_plugins = ["ddpperf.plugin"]\n'
        "def pytest_runtest_setup(item):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        run = canned_suite.run("perf")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    run.assert_one_sentence(0, "PASS: 1 test measured")


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    ["reader, output = os.pipe(); os.close(reader)", "output = os.open('/dev/full', os.O_WRONLY)"],
    ids=["closed pipe", "full disk"],
)
def test_output_that_cannot_be_written_loses_nothing(project: Project, broken: str) -> None:
    (project.root / "conftest.py").write_text(
        "import os\n"
        'pytest_plugins = ["ddpperf.plugin"]\n'
        "def pytest_runtest_logfinish():\n"
        f"    {broken}\n"
        "    os.dup2(output, 1)\n"
    )
    process = project.start("perf", "-s")
    process.communicate(timeout=120)
    assert process.returncode == 4
    assert list(project.measured()) == ["test_all_reduce"]
    project.assert_nothing_left()


@pytest.mark.slow
def test_second_interrupt_does_not_stop_the_verdict(project: Project) -> None:
    project.experiment.write_text(HANGS)
    process = start_until_fault(project)
    began, signals = time.monotonic(), itertools.cycle((signal.SIGINT, signal.SIGTERM))
    while process.poll() is None and time.monotonic() - began < 60:  # no signal may change the status
        process.send_signal(next(signals))
        time.sleep(0.02)
    output, _ = process.communicate(timeout=1)
    assert process.returncode == 125, output
    assert "NO VERDICT: the run was interrupted" in output
    project.assert_nothing_left()


@pytest.mark.slow
def test_interrupt_after_last_round_changes_nothing(project: Project) -> None:
    """The run is judged and saved, and programs that it starts, such as git, go on."""
    (project.root / "conftest.py").write_text(
        "import os, signal, subprocess\n"
        "from ddpperf.workers.pool import Pool\n"
        'pytest_plugins = ["ddpperf.plugin"]\n'
        "close = Pool.close\n"
        "def interrupted(pool):\n"
        "    for name in ('INT', 'TERM'):\n"
        "        os.kill(os.getpid(), signal.Signals['SIG' + name])\n"
        "        subprocess.run(['sh', '-c', f'kill -{name} $$'], check=True)\n"
        "    close(pool)\n"
        "Pool.close = interrupted\n"
    )
    run = project.run("perf")
    assert run.status == 0, run.output
    assert "PASS: 1 test measured" in run.output
    assert "Traceback" not in run.output
    assert len(project.saved_runs()) == 1
