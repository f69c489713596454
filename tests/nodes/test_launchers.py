"""Agents that ssh or torchrun starts, up to a measurement on two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.node.hostfile import Host
from ddpperf.node.ssh_agents import SshAgents
from ddpperf.specs import AllReduceSpec
from tests.nodes.joined import Run, run_of
from tests.project import REPOSITORY, Marked, wait_until
from tests.ssh_server import ssh_server

ACROSS = AllReduceSpec(world_size=2, nbytes=1024)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture
def run(marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(REPOSITORY)
    with run_of(tmp_path) as waiting:
        yield waiting


@pytest.fixture
def agents(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshAgents]:
    """No agents yet, and an ssh server on this machine that ssh reaches as b."""
    folder = tmp_path_factory.mktemp("sshd")
    with ssh_server(folder, ["b"], address="127.0.0.1"):
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        started = SshAgents()
        yield started
        started.close()


def test_ssh_starts_agent_that_measures(run: Run, agents: SshAgents) -> None:
    join = f"127.0.0.1:{run.joining.port}"
    agents.start([Host(name="b")], join=join, key=run.key.read_text())
    run.wait()
    with run.pool() as pool:
        (sample,) = pool.measure(ACROSS).samples
    assert [len(ranks) for ranks in sample.seconds] == [2, 2]
    run.close()
    agents.close()
    assert agents.failures() == []


def test_wrong_key_is_reported_of_its_host(run: Run, agents: SshAgents) -> None:
    agents.start([Host(name="b")], join=f"127.0.0.1:{run.joining.port}", key="5f" * 32)
    wait_until(agents.failures, 60, lambda: "the agent runs on")
    (failure,) = agents.failures()
    assert failure.startswith("host b: the agent exited with status 2 (ddpperf.node: pytest at 127.0.0.1")


def torchrun(ranks: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, ranks, "-m", "ddpperf.node", "--seconds", "10", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_torchrun_starts_agent_that_measures(run: Run) -> None:
    agent = torchrun("1", "--join", f"127.0.0.1:{run.joining.port}", "--key", str(run.key))
    run.wait()
    with run.pool() as pool:
        (sample,) = pool.measure(ACROSS).samples
    assert [len(ranks) for ranks in sample.seconds] == [2, 2]
    run.close()
    output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "has_join", "sentence"),
    [
        ("2", True, "ddpperf.node: a node has one agent, this is local rank 1; pass --nproc-per-node 1"),
        ("1", False, r"ddpperf.node: torchrun's MASTER_ADDR is .*; pass --join HOST:PORT, as pytest prints"),
    ],
)
def test_torchrun_without_what_agents_need_is_refused(
    run: Run, ranks: str, has_join: bool, sentence: str
) -> None:
    join = ["--join", f"127.0.0.1:{run.joining.port}"] if has_join else []
    agent = torchrun(ranks, *join, "--key", str(run.key))
    output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 1
    assert re.search(sentence, output), output
