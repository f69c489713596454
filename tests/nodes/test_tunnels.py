"""Runs on two nodes through ssh tunnels. The second node is a network namespace with its own sshd."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpperf.machine.network import find_interface
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import Nodes, SetOptions
from tests.nodes.joined import listen
from tests.project import REPOSITORY, Marked, wait_until
from tests.ssh_server import ssh_server

pytestmark = pytest.mark.slow
NBYTES = 2**20
TUN = Path("/dev/net/tun")
TUN_NUMBER = 77


@dataclass(frozen=True, kw_only=True)
class Node:
    """A second node: its namespace, the names of both ends of the link to it, both addresses."""

    name: str
    here: str
    there: str
    address_here: str
    address_there: str
    ssh: Path

    def inside(self, *command: str) -> str:
        return subprocess.check_output(["ip", "netns", "exec", self.name, *command], text=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def node(marked: Marked, tmp_path: Path) -> Iterator[Node]:
    name = f"ddpperf-{os.getpid()}"
    here, there = f"dp{os.getpid()}a", f"dp{os.getpid()}b"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {getattr(error, 'stderr', error)!r}")
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", "10.213.7.1/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", "10.213.7.2/30", "dev", there)
        for each in ("lo", there):
            ip("-n", name, "link", "set", each, "up")
        inside = ["ip", "netns", "exec", name]
        options = ["-o", "PermitTunnel=point-to-point"]
        with ssh_server(tmp_path, ["b"], options=options, inside=inside, address="10.213.7.2"):
            yield Node(
                name=name,
                here=here,
                there=there,
                address_here="10.213.7.1",
                address_there="10.213.7.2",
                ssh=tmp_path / "bin" / "ssh",
            )
    finally:
        subprocess.run(["ip", "link", "delete", here], capture_output=True)
        ip("netns", "delete", name)


def measure(node: Node, folder: Path, interface: str, agent: list[str], ssh: list[str]) -> Iterator[str]:
    """Start an agent through ssh, measure an all_reduce on both nodes, and yield while they are joined.

    interface: the controller's. PORT in the arguments stands for the port on which agents join.
    """
    joining = listen(folder, mine := find_interface(interface))
    port = str(joining.port)
    words = [sys.executable, "-m", "ddpperf.node", "--key", "-", "--name", "b", *agent]
    command = f"cd {REPOSITORY} && exec {shlex.join(word.replace('PORT', port) for word in words)}"
    process = subprocess.Popen(
        [str(node.ssh), *(word.replace("PORT", port) for word in ssh), "b", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write((folder / "node.key").read_text())
    process.stdin.flush()
    try:
        joining.wait(60, lambda line: None)
        nodes = Nodes(others=joining.nodes, node_size=1, interface=interface, address=mine.address)
        options = SetOptions(size=2, device="cpu", rounds=2, deadline_seconds=60.0, nodes=nodes)
        with Pool(options) as pool:
            (sample,) = pool.measure(AllReduceSpec(world_size=2, nbytes=NBYTES)).samples
            assert [len(ranks) for ranks in sample.seconds] == [2, 2]
            print("all_reduce of 1 MiB:", min(max(ranks) for ranks in sample.seconds), "s")
            yield port
    finally:
        joining.close()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output


def connections(node: Node, port: str) -> list[str]:
    """Return the node's TCP connections to a port of the first node."""
    return node.inside("ss", "-Htn", "dst", f"{node.address_here}:{port}").splitlines()


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def test_commands_go_through_forwarded_port(node: Node, tmp_path: Path) -> None:
    forward = ["-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:PORT:{node.address_here}:PORT"]
    agent = ["--join", "127.0.0.1:PORT", "--interface", node.there]
    before = sent_bytes(node.here)
    for port in measure(node, tmp_path, node.here, agent, forward):
        assert connections(node, port) == []
        assert sent_bytes(node.here) - before > NBYTES


def test_agent_without_tunnel_connects_directly(node: Node, tmp_path: Path) -> None:
    for port in measure(node, tmp_path, node.here, ["--join", f"{node.address_here}:PORT"], []):
        assert len(connections(node, port)) == 2, "the agent's, and its rank's"


@pytest.mark.skipif(not os.access(TUN, os.W_OK), reason=f"ssh -w needs {TUN}")
def test_everything_goes_through_tun_device(node: Node, tmp_path: Path) -> None:
    tun = f"tun{TUN_NUMBER}"
    tunnel = subprocess.Popen([str(node.ssh), "-N", "-w", f"{TUN_NUMBER}:{TUN_NUMBER}", "b"])
    try:
        wait_until(Path(f"/sys/class/net/{tun}").exists, 10, lambda: f"no {tun} here")
        wait_until(lambda: tun in node.inside("ip", "-o", "link"), 10, lambda: f"no {tun} there")
        for namespace, mine, other in (([], "1", "2"), (["-n", node.name], "2", "1")):
            ip(*namespace, "address", "add", f"10.213.8.{mine}", "peer", f"10.213.8.{other}", "dev", tun)
            ip(*namespace, "link", "set", tun, "up")
        before = sent_bytes(tun)
        for _ in measure(node, tmp_path, tun, ["--join", "10.213.8.1:PORT"], []):
            assert sent_bytes(tun) - before > NBYTES
            peers = {line.split()[4].rpartition(":")[0] for line in node.inside("ss", "-Htn").splitlines()}
            assert node.address_here in peers, "ssh itself"
            direct = node.inside("ss", "-Htn", "src", node.address_there).splitlines()
            assert len(direct) == 2, "the connections of ssh: the tunnel, and the agent's start"
    finally:
        tunnel.terminate()
        tunnel.wait()
