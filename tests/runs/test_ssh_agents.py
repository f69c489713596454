"""Agents started by ssh, through a real ssh server on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpperf.errors import Refused
from ddpperf.node.hostfile import Host
from ddpperf.node.ssh_agents import SshAgents
from tests.project import REPOSITORY, Project, wait_until, wait_while_it_runs
from tests.ssh_server import free_port, ssh_server

KEY = "5f" * 32
# Takes the place of the agent: it writes down how it was started, then waits for the file `end`.
STAND_IN = """
import json, os, pathlib, sys, time
found = {"arguments": sys.argv[1:], "key": sys.stdin.readline(), "path": os.environ["PYTHONPATH"]}
found["environment"] = dict(os.environ)
found["process"] = os.getpid()
pathlib.Path("new").write_text(json.dumps(found))
os.rename("new", "started")
while not os.path.exists("end"):
    time.sleep(0.02)
sys.exit(print("a wrong key; copy the key file of node 0") or int(pathlib.Path("end").read_text()))
"""

# Starts an agent on b as pytest does, and prints the process id of its ssh.
CONTROLLER = """
import sys, time
from ddpperf.node.hostfile import Host
from ddpperf.node.ssh_agents import SshAgents
agents = SshAgents()
agents.start([Host(name="b")], join="10.0.0.1:29400", key=sys.argv[1])
print(agents._agents[0].process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with an `ssh` that reaches a server on this machine as b."""
    folder = tmp_path_factory.mktemp("sshd")
    with ssh_server(folder, ["b"], address="127.0.0.1"):
        yield folder / "bin"


@pytest.fixture
def folder(tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which agents start: its name needs quotes, and a stand-in is their program."""
    package = tmp_path / "it's $HOME; here" / "ddpperf" / "node"
    package.mkdir(parents=True)
    for each in (package.parent, package):
        (each / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.chdir(package.parents[1])
    monkeypatch.setenv("PATH", f"{server}:{os.environ['PATH']}")
    return package.parents[1]


def start(agents: SshAgents, host: str = "b", port: int | None = None) -> None:
    agents.start([Host(name=host, port=port)], join="10.0.0.1:29400", key=KEY)


def wait_for_failure(agents: SshAgents) -> str:
    wait_until(agents.failures, 60, lambda: "the agent runs on")
    (failure,) = agents.failures()
    return failure


def test_agent_gets_key_on_standard_input_only(folder: Path) -> None:
    agents = SshAgents()
    start(agents)
    wait_until((folder / "started").exists, 60, lambda: str(agents.failures()))
    found = json.loads((folder / "started").read_text())
    assert found["key"] == f"{KEY}\n"
    assert KEY not in str(found["environment"])
    assert found["arguments"] == [*("--join", "10.0.0.1:29400", "--key", "-", "--name", "b")]
    assert found["path"].split(":")[0] == str(REPOSITORY)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "--join 10.0.0.1:29400" in shown
    assert KEY not in shown
    (folder / "end").write_text("0")
    agents.close()
    assert not Path(f"/proc/{found['process']}").exists()


def test_refusal_by_agent_is_quoted(folder: Path) -> None:
    (folder / "end").write_text("2")
    agents = SshAgents()
    start(agents)
    assert wait_for_failure(agents) == (
        "host b: the agent exited with status 2 (a wrong key; copy the key file of node 0)"
    )
    agents.close()


def test_missing_interpreter_on_node_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    agents = SshAgents()
    start(agents)
    failure = wait_for_failure(agents)
    assert re.match(
        r"host b: the agent did not start, status 127 \(.*/no/such/python.*: No such file", failure
    )
    assert failure.endswith(
        f"; the host needs the folder {folder} and the interpreter /no/such/python, with ddpperf"
    )
    agents.close()


def test_host_that_answers_not_is_named(folder: Path) -> None:
    agents = SshAgents()
    start(agents, "b", port := free_port())
    failure = wait_for_failure(agents)
    assert failure.startswith(f"host b:{port}: ssh exited with status 255 (ssh: connect to host")
    assert failure.endswith(
        f"Connection refused); make the command `ssh -o BatchMode=yes -p {port} b true` work"
    )
    agents.close()


def test_host_with_unknown_key_is_not_used(folder: Path, server: Path) -> None:
    known = server.with_name("known_hosts")
    kept = known.read_text()
    known.write_text("")
    agents = SshAgents()
    try:
        start(agents)
        assert "255 (Host key verification failed)" in wait_for_failure(agents)
    finally:
        known.write_text(kept)
        agents.close()


def test_missing_ssh_client_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(Refused, match=r"--hostfile needs the ssh client, which cannot be started \(No such"):
        start(SshAgents())


def test_killed_controller_leaves_no_ssh(folder: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-P", "-c", CONTROLLER, KEY],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert controller.stdout is not None
    with controller.stdout:
        ssh = int(controller.stdout.readline())
    wait_until((folder / "started").exists, 60, lambda: "the agent has not started")
    os.kill(ssh, 0)
    controller.kill()
    controller.wait()
    wait_until(lambda: not Path(f"/proc/{ssh}").exists(), 10, lambda: "ssh runs on")
    (folder / "end").write_text("0")


@pytest.mark.slow
def test_hostfile_is_all_that_two_nodes_need(project: Project, server: Path) -> None:
    project.environment["PATH"] = f"{server}:{project.environment['PATH']}"
    hosts = project.root / "hosts"
    hosts.write_text("b slots=8\n")
    nodes = ["perf", "--nodes", "2", "--hostfile", str(hosts), "--interface", "lo"]
    finished = project.run(*nodes, "--node-port", str(free_port()))
    assert finished.status == 0, finished
    assert "ddpperf: waiting for 1 of 2 nodes; ssh starts their agents" in finished.lines
    assert f"ddpperf: {hosts}: slots= is not used; --node-size sets" in finished.output
    hosts.write_text(f"b:{free_port()}\n")
    began = time.monotonic()
    refused = project.run(*nodes, "--node-port", str(free_port()), "--node-seconds", "600")
    refused.assert_one_sentence(4, "host b:", "ssh exited with status 255", "Connection refused")
    assert time.monotonic() - began < 600, "it does not wait for an agent that cannot come"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_nothing_on_nodes(
    project: Project, server: Path, number: signal.Signals
) -> None:
    project.environment["PATH"] = f"{server}:{project.environment['PATH']}"
    (project.root / "hosts").write_text("b\n")
    port = str(free_port())
    nodes = ["--nodes", "2", "--hostfile", "hosts", "--interface", "lo", "--node-port", port]
    pytest_process = project.start("perf", *nodes, "--rounds", "100000")

    def agents() -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if f"127.0.0.1:{port}" in (process.info["cmdline"] or [])
        ]

    def ranks() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a process that ended meanwhile
            return [rank for agent in agents() for rank in agent.children(recursive=True)]
        return []

    wait_while_it_runs(pytest_process, lambda: agents() and ranks(), "the agent has no ranks")
    left = [*agents(), *ranks(), *psutil.Process(pytest_process.pid).children(recursive=True)]
    assert any(process.name() == "ssh" for process in left)
    pytest_process.send_signal(number)
    pytest_process.communicate()
    wait_until(lambda: not any(process.is_running() for process in left), 10, lambda: str(left))
