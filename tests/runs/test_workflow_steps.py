"""The workflows of .github/, step by step on a scratch repository, with a command `gh` of the tests."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_gh import TOKEN, Held, held, install
from tests.project import REPOSITORY, SLEEPING_MODEL, Marked, git
from tests.workflow import Finished, Runner, workflow_of_another_repository

PULL_REQUEST = {
    "number": 5,
    "head": {"sha": "a" * 40, "repo": {"full_name": "team/ddpperf"}},
}
CPU = "--device cpu --world-sizes 2 --rounds 3 --epoch-images 64 -p no:cacheprovider"
SAMPLER = f"-k sampler {CPU}"  # lists indices on two ranks, so it starts no training
STEP = f"-k sleeping_step {CPU} --world-sizes 1 --model mine:sleeping"
EXPERIMENT = """
from ddpperf.specs import TrainingSpec

def test_sleeping_step(measure):
    spec = TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=8, strategy="single")
    seconds = measure(spec).median_step_seconds()
    measure.metric("images_per_second", {name: 8 / step for name, step in seconds.items()})
"""
# The limit is so large that a busy machine does not reach it, and every test could show it.
LIMIT = "--benchmark-compare-fail=median:300%"


@dataclass
class Machine:
    """A machine with a checkout of a scratch repository, its origin, and a runner."""

    runner: Runner
    root: Path
    origin: Path
    marked: Marked

    def run(
        self, workflow: str | dict[str, Any], job: str, settings: str, token: str = TOKEN, **more: str
    ) -> Finished:
        """Run a job; settings are the arguments of pytest, and `more` other repository variables."""
        shutil.rmtree(self.runner.temp, ignore_errors=True)  # as GitHub's runner does before each job
        known = {"DDPPERF_ENVIRONMENT": str(self.root.parent / "python"), "DDPPERF_ARGUMENTS": settings}
        github = {**self.runner.github, "token": token}
        runner = replace(self.runner, settings={**known, **more}, github=github)
        finished = runner.run(workflow, job)
        self.marked.assert_nothing_left()
        return finished

    @property
    def github(self) -> Held:
        return held(self.marked.environment)

    def commit(self, message: str) -> None:
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "-m", message)

    def on_pull_request(self, **pull_request: Any) -> Machine:
        event = {"pull_request": PULL_REQUEST | pull_request}
        github = {"event": event, "base_ref": "main"}
        return replace(self, runner=replace(self.runner, github=github))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    root, origin = tmp_path / "checkout", tmp_path / "origin.git"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "baselines")
    for name in ("ddpperf", "perf", ".github", "tools"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignore)
    for name in ("conftest.py", "pyproject.toml", ".gitignore"):
        shutil.copy(REPOSITORY / name, root)
    (root / "perf" / "test_it.py").write_text(EXPERIMENT)
    (root / "mine.py").write_text(SLEEPING_MODEL.format(seconds=0.06))
    python = tmp_path / "python" / "bin" / "python"  # the environment of the tests, as a folder
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    marked = Marked()
    marked.environment = {
        name: text for name, text in marked.environment.items() if not name.startswith(("GIT_", "PIP_"))
    } | {
        "PYTHONPATH": str(root),
        "PIP_CONFIG_FILE": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    marked.environment |= install(tmp_path / "bin")
    runner = Runner(workspace=root, temp=tmp_path / "temp", variables=marked.environment)
    machine = Machine(runner=runner, root=root, origin=origin, marked=marked)
    git(tmp_path, "init", "--quiet", "--bare", "-b", "main", str(origin))
    git(machine.root, "init", "--quiet", "-b", "main")
    git(machine.root, "remote", "add", "origin", str(origin))
    machine.commit("first")
    git(machine.root, "push", "--quiet", "origin", "main")
    yield machine
    marked.clean()


def sentences(finished: Finished) -> list[str]:
    """Return the annotations of the job."""
    return re.findall(r"^::(\w+ title=ddpperf::.*)$", finished.log, re.MULTILINE)


# --- a real run


@pytest.mark.slow
def test_nights_compare_with_the_branch_and_promote(machine: Machine) -> None:
    first = machine.run("nightly-gpu.yml", "nightly", f"{STEP} {LIMIT}", DDPPERF_PROMOTE="branch")
    assert first.conclusion == "success", first
    (annotation,) = sentences(first)
    assert annotation.startswith("warning title=ddpperf::NO VERDICT: no baseline for cpu"), annotation
    (check,) = machine.github["checks"]
    assert (check["name"], check["conclusion"]) == ("ddpperf: nightly GPU run / nightly", "neutral")
    assert first.summary == check["output[summary]"], "the summary of the step is the verdict's page"
    assert first.artifacts == {
        "ddpperf-nightly": ["junit.xml", "output.txt", "report.html", "run.json", "verdict.md"]
    }
    shutil.rmtree(machine.root / ".ddpperf")  # only the branch has the baseline
    second = machine.run("nightly-gpu.yml", "nightly", f"{STEP} {LIMIT}", DDPPERF_PROMOTE="branch")
    assert [check["conclusion"] for check in machine.github["checks"]] == ["neutral", "success"], second
    assert "PASS: 1 test measured, nothing got slower than the code of 0001_nightly.json" in second.log
    assert git(machine.root, "log", "--format=%s", "origin/ddpperf-baselines").splitlines() == [
        "Store the baseline 0002_nightly.json",
        "Store the baseline 0001_nightly.json",
        "first",
    ]


@pytest.mark.slow
def test_time_limit_is_no_verdict(machine: Machine) -> None:
    """After 12 s of sleeping steps, which would take minutes."""
    workflow = with_inputs(machine, minutes="0.2")
    long = STEP.replace("--rounds 3", "--rounds 3000")
    night = machine.run(workflow, "nightly", long, DDPPERF_PROMOTE="branch")
    assert night.conclusion == "success", night
    (check,) = machine.github["checks"]
    assert check["conclusion"] == "neutral"
    assert "the run was interrupted by SIGTERM" in check["output[summary]"]
    assert "warning title=ddpperf::no baseline was stored: " in sentences(night)[-1]
    assert "ddpperf-baselines" not in git(machine.root, "branch", "--remotes")


@pytest.mark.slow
def test_gate_of_another_repository_finds_a_slow_down(machine: Machine) -> None:
    git(machine.root, "checkout", "--quiet", "-b", "topic")
    (machine.root / "mine.py").write_text(SLEEPING_MODEL.format(seconds=0.3))
    machine.commit("slow")
    gate = documented_gate(machine, arguments=f"perf/ {STEP} -k 'sleeping_step and not sampler'")
    finished = machine.on_pull_request().run(gate, "gate", "")
    assert finished.conclusion == "failure", finished
    (annotation,) = sentences(finished)
    assert annotation.startswith("error title=ddpperf::FAIL: ")
    assert " is worse: test_sleeping_step by +" in annotation
    assert [check["conclusion"] for check in machine.github["checks"]] == ["failure"]
    assert [check["head_sha"] for check in machine.github["checks"]] == ["a" * 40], (
        "the pull request's commit"
    )


def documented_gate(machine: Machine, arguments: str) -> dict[str, Any]:
    """Return the ten lines of docs/nightly.md, for the CPU and the environment of the tests."""
    gate = yaml.safe_load(workflow_of_another_repository("gate"))
    environment = str(machine.root.parent / "python")
    gate["jobs"]["gate"]["steps"][-1]["with"] |= {"arguments": arguments, "environment": environment}
    return {"name": "performance", **gate}


# --- the merge gate


@pytest.mark.slow
def test_gate_without_gpus_is_red_and_says_why(machine: Machine) -> None:
    """A gate that can measure then edits the comment."""
    machine = machine.on_pull_request()
    refused = machine.run("merge-gate.yml", "gate", "")
    assert refused.conclusion == "failure"
    assert refused.artifacts == {"ddpperf-gate": ["output.txt"]}
    why = "world_size=1 needs 1 GPU, found 0; pass --device cpu"
    assert sentences(refused) == [f"error title=ddpperf::no verdict, exit status 4: {why}"]
    (comment,) = machine.github["comments"]
    assert f"ERROR: {why}" in comment["body"]
    gate = machine.run("merge-gate.yml", "gate", f"-k nothing {CPU}")
    assert gate.conclusion == "success", gate
    (comment,) = machine.github["comments"]
    assert "## ddpperf: NO VERDICT\n\n```text\nall " in comment["body"]
    assert [check["conclusion"] for check in machine.github["checks"]] == ["failure", "neutral"]


def test_workflows_of_a_fork_measure_nothing(machine: Machine) -> None:
    night = replace(machine.runner, github={"event": {"repository": {"fork": True}}})
    for workflow, job in (("nightly-gpu.yml", "nightly"), ("nightly-torch.yml", "torch")):
        assert replace(machine, runner=night).run(workflow, job, CPU).conclusion == "skipped"
    machine = machine.on_pull_request(head={"sha": "b" * 40, "repo": {"full_name": "someone/ddpperf"}})
    assert machine.run("merge-gate.yml", "gate", CPU).conclusion == "skipped"
    fork = machine.run("merge-gate.yml", "fork", CPU)
    assert fork.conclusion == "success"
    assert fork.summary.startswith("The merge gate does not run the code of a fork. To measure this pull")
    assert machine.github == {"comments": [], "checks": []}


@pytest.mark.parametrize("repository", [{"full_name": "someone/ddpperf"}, None], ids=["fork", "deleted fork"])
def test_action_refuses_the_code_of_a_fork(machine: Machine, repository: dict[str, str] | None) -> None:
    """In a gate whose author forgot the condition on the repository."""
    gate = documented_gate(machine, f"perf/ -k nothing {CPU}")
    del gate["jobs"]["gate"]["if"]
    machine = machine.on_pull_request(head={"sha": "b" * 40, "repo": repository})
    finished = machine.run(gate, "gate", "")
    assert finished.conclusion == "failure"
    assert "the code of a fork does not run on a self-hosted runner" in sentences(finished)[0]
    assert finished.ran[-1] == "Check the inputs"


# --- refusals


def with_inputs(machine: Machine, **inputs: str) -> dict[str, Any]:
    """Return the nightly workflow with more inputs of the action."""
    workflow = machine.runner.content("nightly-gpu.yml")
    workflow["jobs"]["nightly"]["steps"][-1]["with"] |= inputs
    return workflow


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"output": "{full}"}, "the output folder {full} is not an empty folder; empty it"),
        ({"promote": "yes"}, "promote takes none or branch, got 'yes'"),
        ({"baselines-branch": "my branch"}, "baselines-branch takes the name of a branch, got 'my branch'"),
        ({"minutes": "0.0"}, "minutes takes a number above 0, got '0.0'"),
        ({"arguments": "perf/ -k it's"}, "arguments has a quote that does not end; write \\' for"),
        ({"environment": "/nowhere"}, "environment needs a folder with bin/python, got '/nowhere'; make one"),
        (
            {"environment": "", "python": "python9"},
            "python names 'python9', which is no Python 3.11 or newer",
        ),
        ({"base": "origin/none"}, "origin/none has no common commit with the checkout; name a branch"),
    ],
)
def test_wrong_input_is_one_sentence(
    machine: Machine, inputs: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").touch()
    given = {name: text.format(full=full) for name, text in inputs.items()}
    night = machine.run(with_inputs(machine, **given), "nightly", SAMPLER)
    assert night.conclusion == "failure"
    (annotation,) = sentences(night)
    assert annotation.startswith(f"error title=ddpperf::{sentence.format(full=full)}")
    assert "Run pytest" not in night.ran
    assert (full / "mine.txt").exists()


ACCEPTED = "-m tools.torch_nightly accept 2.15.0\n"
SEARCHED = "-m ddpperf.bisect --good torch==2.14.0 --bad torch==2.15.0 --environments envs\n"


@pytest.mark.parametrize(
    ("arguments", "good", "status", "ran"),
    [
        ("", "", 0, ""),
        ("--candidate=p", "2.14.0", 0, ACCEPTED),
        ("--candidate=p", "2.14.0", 1, SEARCHED),
        ("--candidate=p", "", 1, ""),
        ("--candidate=p", "2.14.0", 125, ""),
    ],
)
def test_torch_night_follows_the_verdict(
    machine: Machine, arguments: str, good: str, status: int, ran: str
) -> None:
    """The first two steps only write their outputs, and echo takes the place of Python."""
    workflow = machine.runner.content("nightly-torch.yml")
    _, candidate, gate, *_ = workflow["jobs"]["torch"]["steps"]
    outputs = f"version=2.15.0\\narguments={arguments}\\ngood={good}\\nfolder=envs\\n"
    candidate["run"] = f'printf "{outputs}" >>"$GITHUB_OUTPUT"'
    written = f"status={status}\\npython=echo\\n"
    gate["run"] = f'printf "{written}" >>"$GITHUB_OUTPUT"; exit {status % 125}'
    del gate["uses"]
    night = machine.run(workflow, "torch", "", DDPPERF_PYTHON="echo")
    assert night.conclusion == ("failure" if status == 1 else "success")
    assert night.log == ran
    assert ("Compare with the last good nightly" in night.ran) is bool(arguments)


def test_run_without_performance_tests_is_red(machine: Machine) -> None:
    """pytest ends with status 0, and nothing was measured."""
    night = machine.run(with_inputs(machine, arguments=f"perf/ --collect-only {SAMPLER}"), "nightly", "")
    assert night.conclusion == "failure"
    assert sentences(night) == [
        "error title=ddpperf::no verdict, exit status 0: no performance test was measured; read the log"
    ]
    assert [check["conclusion"] for check in machine.github["checks"]] == ["failure"]
