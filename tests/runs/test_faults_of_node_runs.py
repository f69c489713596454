"""A run of pytest on two nodes that is ended at a bad moment leaves no agent, rank or file."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from tests.project import REPOSITORY, Project, wait_while_it_runs
from tests.ssh_server import free_port

pytestmark = pytest.mark.slow
END_SECONDS = 12.0
LONG = """
from ddpperf.specs import AllReduceSpec

def test_long(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
"""


class NodeRun:
    """A run on two nodes of loopback, and the agent of the second node."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.experiment.write_text(LONG)
        self.port = free_port()
        self.key = project.root / "node.key"
        on_nodes = ["--nodes", "2", "--node-size", "1", "--interface", "lo", "--node-port", str(self.port)]
        to_files = ["--node-key", str(self.key), "--worker-logs", str(project.root / "logs")]
        self.pytest = project.start("perf", "-s", *on_nodes, *to_files, "--rounds", "2000")

    def start_agent(self) -> subprocess.Popen[str]:
        join = ["--join", f"127.0.0.1:{self.port}", "--key", str(self.key), "--name", "b"]
        return subprocess.Popen(
            [sys.executable, "-m", "ddpperf.node", *join, "--seconds", "5"],
            cwd=REPOSITORY,
            env=self.project.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_waiting(self) -> None:
        def is_listening() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_while_it_runs(self.pytest, is_listening, "it does not wait for nodes")

    def wait_for_sampling(self) -> None:
        wait_while_it_runs(self.pytest, lambda: len(self.project.ranks()) == 2, "no ranks")

        def has_sampled() -> bool:
            return any("seconds" in log.read_text() for log in (self.project.root / "logs").glob("*.log"))

        wait_while_it_runs(self.pytest, has_sampled, "nothing is sampled")


@pytest.fixture
def node_run(project: Project) -> NodeRun:
    return NodeRun(project)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("number", SIGNALS)
def test_ended_while_it_waits_for_nodes(node_run: NodeRun, number: signal.Signals) -> None:
    node_run.wait_for_waiting()
    node_run.pytest.send_signal(number)
    output, _ = node_run.pytest.communicate(timeout=END_SECONDS)
    assert node_run.pytest.returncode == (-9 if number is signal.SIGKILL else 125), output
    agent = node_run.start_agent()
    said, _ = agent.communicate(timeout=END_SECONDS)
    waits, refusal = said.splitlines()
    assert agent.returncode == 2, said
    assert "waiting for pytest at 127.0.0.1" in waits
    assert "no run answers at 127.0.0.1" in refusal
    node_run.project.assert_nothing_left()


@pytest.mark.parametrize("number", SIGNALS)
def test_ended_while_it_measures(node_run: NodeRun, number: signal.Signals) -> None:
    node_run.wait_for_waiting()
    agent = node_run.start_agent()
    node_run.wait_for_sampling()
    node_run.pytest.send_signal(number)
    output, _ = node_run.pytest.communicate(timeout=END_SECONDS)
    killed = number is signal.SIGKILL
    assert node_run.pytest.returncode == (-9 if killed else 125), output
    said, _ = agent.communicate(timeout=END_SECONDS)
    assert agent.returncode == (3 if killed else 0), said
    node_run.project.assert_nothing_left()


def test_agent_that_dies_fails_one_test(node_run: NodeRun) -> None:
    node_run.wait_for_waiting()
    agent = node_run.start_agent()
    node_run.wait_for_sampling()
    agent.kill()
    output, _ = node_run.pytest.communicate(timeout=2 * END_SECONDS)
    agent.communicate()
    assert node_run.pytest.returncode == 1, output
    assert "rank 1 of set A1 on node 1 (b) was lost: its agent has ended" in output
    assert "start the agent of node 1 (b) again" in output
    node_run.project.assert_nothing_left()


def test_port_in_use_is_one_sentence(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        run = project.run(
            "perf", "--nodes", "2", "--node-size", "1", "--interface", "lo", "--node-port", port
        )
    assert run.status == 4
    assert f"--node-port {port} on lo (127.0.0.1) cannot be used (Address already in use)" in run.output
    assert "Traceback" not in run.output
