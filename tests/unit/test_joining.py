"""Agents and strangers at the port of a controller in this process; no process is started."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.network import Interface, find_interface
from ddpperf.node.__main__ import LOST, REFUSED, main
from ddpperf.node.agent_ranks import AgentRanks
from ddpperf.node.handshake import connect, make_key, read_key
from ddpperf.node.joined_node import JoinedNode
from ddpperf.node.joining import Joining
from ddpperf.node.listener import MOST_STRANGERS, Listener
from ddpperf.specs import DATA_VARIABLE
from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import Nodes, ProcessSet, SetOptions
from tests.project import wait_until

KEY = bytes(32)
LOOPBACK: Interface = find_interface("lo")
FACTS = {"protocol": "1", "GPU driver": "none", "torch": "2.13.0", "commit of ddpperf": "abc"}
WELCOME = {"device": "cpu", "ranks": 1, "data": "synthetic", "machine": "this one"}
QUIET_SECONDS = 3.0  # for what takes some milliseconds, on a busy machine


@pytest.fixture
def joining() -> Iterator[Joining]:
    made = Joining(LOOPBACK, 0, KEY, count=2, expected=FACTS, welcome=WELCOME, digest="d1")
    yield made
    made.close()


class Agent:
    """An agent in this process, which joins and prepares its node, and answers nothing else."""

    def __init__(self, joining: Joining, name: str = "b", *, digest: str = "d1", **facts: str) -> None:
        self.connection = connect(("127.0.0.1", joining.port), KEY)
        of_device = {**FACTS, **{fact.replace("_", " "): value for fact, value in facts.items()}}
        channel.send(self.connection, {"name": name, "facts": {"cpu": of_device}, "interface": "lo"})
        self.answer = channel.receive(self.connection)
        if "welcome" in self.answer:
            self.next("prepare")
            channel.send(self.connection, {"prepare": {"problem": "", "digest": digest, "cores": [[5]]}})

    def next_message(self, key: str) -> Message:
        """Return the next message that has this key."""
        while key not in (message := channel.receive(self.connection)):
            continue
        return message

    def next(self, key: str) -> Any:
        """Return the value of the next message that has this key."""
        return self.next_message(key)[key]


def wait_for(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, QUIET_SECONDS, lambda: what)


def wait_for_refusals(joining: Joining, count: int) -> None:
    wait_for(lambda: len(joining.refused) == count, f"not {count} were refused, {joining.refused}")


def stranger(joining: Joining) -> socket.socket:
    return socket.create_connection(("127.0.0.1", joining.port))


# --- agents


def test_agent_joins_and_is_usable(joining: Joining) -> None:
    agent = Agent(joining)
    assert agent.answer["welcome"] == {"node": 1, **WELCOME}
    joining.wait(QUIET_SECONDS, lambda line: None)
    assert [(node.number, node.name, node.cores) for node in joining.joined()] == [(1, "b", [[5]])]


@pytest.mark.parametrize(
    "other", [{"protocol": "2"}, {"torch": "2.12.0"}, {"GPU_driver": "580.1"}, {"commit_of_ddpperf": "abd"}]
)
def test_agent_that_differs_is_refused(joining: Joining, other: dict[str, str]) -> None:
    ((fact, value),) = other.items()
    name = fact.replace("_", " ")
    expected = f"{name} on node b is {value}, on the first node {FACTS[name]}; all nodes of a run must be"
    assert Agent(joining, **other).answer["refused"].startswith(expected)
    assert joining.nodes == []


def test_agent_with_other_images_is_refused(joining: Joining) -> None:
    agent = Agent(joining, digest="d2")
    expected = "the images on node b have the digest d2, on the first node d1; copy"
    assert agent.next("refused").startswith(expected)
    wait_for(lambda: joining.refused, "it was not refused")
    assert joining.joined() == []


def test_second_agent_of_a_node_is_refused(joining: Joining) -> None:
    first, second = Agent(joining), Agent(joining)
    assert "welcome" in first.answer
    assert second.answer["refused"].startswith("node b has joined already; end one of its two agents")


def test_agent_too_many_is_refused(joining: Joining) -> None:
    first, second = Agent(joining), Agent(joining, "c")
    assert "welcome" in first.answer
    assert second.answer["refused"].startswith("all 2 nodes have joined; end this agent")


def test_agent_takes_place_of_its_lost_node() -> None:
    joining = Joining(LOOPBACK, 0, KEY, count=3, expected=FACTS, welcome=WELCOME, digest="d1")
    with contextlib.closing(joining):
        for agent in (Agent(joining, "b"), Agent(joining, "c")):
            agent.connection.close()
        wait_for(lambda: len(joining.nodes) == 2 and all(n.lost for n in joining.nodes), "not lost")
        assert Agent(joining, "c").answer["welcome"]["node"] == 2
        assert Agent(joining, "d").answer["welcome"]["node"] == 1


def test_fewer_nodes_than_requested_are_refused(joining: Joining) -> None:
    Agent(joining, torch="2.12.0")
    with pytest.raises(
        Refused, match=r"^--nodes 2: 1 of 2 nodes did not join within 0.1 s; .*torch on node b"
    ):
        joining.wait(0.1, lambda line: None)


def test_port_in_use_is_refused(joining: Joining) -> None:
    with pytest.raises(
        Refused, match=rf"^--node-port {joining.port} on lo .*\(Address already in use\); pass another"
    ):
        Joining(LOOPBACK, joining.port, KEY, count=2, expected={}, welcome={}, digest="")


def test_missing_interface_is_refused() -> None:
    with pytest.raises(Refused, match=r"^--interface none7 is no network interface that is up, found lo"):
        find_interface("none7")


# --- ranks


def rank_connection(joining: Joining, token: str) -> Connection:
    connection = connect(("127.0.0.1", joining.port), KEY)
    channel.send(connection, {"rank": token, "node": 1})
    return connection


def assert_closed(connection: Connection) -> None:
    assert connection.poll(QUIET_SECONDS)
    with pytest.raises((EOFError, ConnectionResetError)):
        channel.receive(connection)


def start_rank(joining: Joining) -> Any:
    joining.wait(QUIET_SECONDS, lambda line: None)
    return joining.nodes[0].start_rank(1, 0, set_name="A1", side=Side(), device="cpu", log_folder=None)


def test_rank_that_connects_after_its_node_was_lost_ends(joining: Joining) -> None:
    agent = Agent(joining)
    rank = start_rank(joining)
    agent.connection.close()
    wait_for(lambda: joining.nodes[0].lost, "the node is not lost")
    late = rank_connection(joining, rank.token)
    assert_closed(late)
    assert rank.connect().what == "was not started, its node was lost: its agent has ended"
    assert rank.channel is None


def test_rank_that_nobody_waits_for_ends(joining: Joining) -> None:
    agent = Agent(joining)
    rank = start_rank(joining)
    rank.kill()
    rank.close()
    assert agent.next("kill") == rank.token
    assert_closed(rank_connection(joining, rank.token))
    assert_closed(rank_connection(joining, "of no rank"))


def test_run_may_end_before_an_agent_is_welcomed() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        JoinedNode(1, ours, {"name": "b"}).close()
        assert channel.receive(theirs) == {"goodbye": True}


def test_agent_that_leaves_says_why(joining: Joining) -> None:
    agent = Agent(joining)
    joining.wait(QUIET_SECONDS, lambda line: None)
    channel.send(agent.connection, {"leaving": "SIGTERM"})
    wait_for(lambda: joining.nodes[0].lost, "the node is not lost")
    assert joining.nodes[0].lost == "its agent was ended by SIGTERM"


@pytest.mark.parametrize(
    "garbage",
    [
        b"no JSON",
        b"[]",
        b"{" * 100_000,
        b'{"ended": []}',
        b'{"pong": 1, "time": null}',
        b'{"pong": 1, "time": NaN}',
        b'{"pong": 5, "time": 1%s}' % (b"0" * 400),
        b'{"pong": {}}',
        b'{"prepare": 5}',
        b'{"prepare": {"problem": "", "cores": 5}}',
        b'{"prepare": {"problem": "", "cores": [["all"]]}}',
        b'{"rank": [], "ended": true}',
        b'{"rank": "%s"}' % (b"x" * 1000) + b"x" * 100_000,
    ],
)
def test_agent_that_sends_garbage_is_lost(joining: Joining, garbage: bytes) -> None:
    agent = Agent(joining)
    joining.wait(QUIET_SECONDS, lambda line: None)
    agent.connection.send_bytes(garbage)
    wait_for(lambda: joining.nodes[0].lost, "the node is not lost")
    assert joining.nodes[0].lost.startswith("its agent sent a message that pytest cannot read")
    assert len(joining.nodes[0].lost) < 300


@pytest.mark.slow
def test_agent_that_stops_within_a_message_is_lost(joining: Joining) -> None:
    agent = Agent(joining)
    joining.wait(QUIET_SECONDS, lambda line: None)
    os.write(agent.connection.fileno(), struct.pack("!i", 100) + b'{"pong": 1')
    wait_until(lambda: joining.nodes[0].lost, 8, lambda: "the node is not lost")
    assert "silent for 5 s" in joining.nodes[0].lost


@pytest.mark.slow
def test_full_buffer_loses_the_node(joining: Joining) -> None:
    agent = Agent(joining)
    joining.wait(QUIET_SECONDS, lambda line: None)
    began = time.monotonic()
    while not joining.nodes[0].lost:
        joining.nodes[0].tell({"start": "x" * 2**20})
    assert time.monotonic() - began < 8
    assert agent.answer


def test_nodes_get_their_ranks_in_order() -> None:
    made = Joining(LOOPBACK, 0, KEY, count=3, expected=FACTS, welcome=WELCOME, digest="d1")
    with contextlib.closing(made):
        agents = [Agent(made, "b"), Agent(made, "c")]
        made.wait(QUIET_SECONDS, lambda line: None)
        nodes = Nodes(others=made.nodes, node_size=2)
        options = SetOptions(size=6, device="cpu", rounds=1, deadline_seconds=9.0, nodes=nodes)
        process_set = ProcessSet("A1", Side(), options)
        for rank in (2, 3, 4, 5):
            assert process_set._start_rank(rank).rank == rank
        process_set.kill()
        for agent, ranks in zip(agents, [(2, 3), (4, 5)], strict=True):
            for node_rank, rank in enumerate(ranks):
                message = agent.next_message("start")
                assert (message["rank"], message["node_rank"]) == (rank, node_rank)


def test_started_rank_knows_its_place(joining: Joining, tmp_path: Path) -> None:
    """It gets its GPU's index on its node, and the interface and the images of the node."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o700)
    started = AgentRanks(("127.0.0.1", joining.port), KEY, "veth7")
    started.data_path = tmp_path / "images of this node"
    side = {"name": "A", "python": str(python), "root": None, "environment": {DATA_VARIABLE: "of node 0"}}
    where = {"set": "A1", "rank": 5, "node_rank": 1, "device": "cpu", "log_folder": str(tmp_path)}
    started.start("token", 1, {**where, "side": side})
    next(iter(started.exits().values())).process.wait(5.0)
    started.end_all()  # reads what is left in the pipe
    variables = (tmp_path / "A1-rank5.log").read_text().splitlines()
    expected = ["RANK=5", "LOCAL_RANK=1", "GLOO_SOCKET_IFNAME=veth7", "NCCL_SOCKET_IFNAME=veth7"]
    assert {*expected, f"{DATA_VARIABLE}={tmp_path / 'images of this node'}"} <= {*variables}
    assert not any(KEY.hex() in line for line in variables)


def test_clock_offset_lies_within_its_error(joining: Joining) -> None:
    """The way back takes 50 ms longer than the way there."""
    agent = Agent(joining)
    node = joining.nodes[0]
    while node.clock is None:
        ping = agent.next("ping")
        theirs = time.time() + 100.0
        time.sleep(0.05)
        channel.send(agent.connection, {"pong": ping, "time": theirs})
    assert abs(node.clock.offset_seconds - 100.0) <= node.clock.error_seconds < QUIET_SECONDS


# --- strangers


def test_port_is_open_on_its_interface_alone(joining: Joining) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", joining.port))


def test_wrong_key_is_refused(joining: Joining, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", joining.port), bytes(31) + b"1")
    wait_for(lambda: joining.refused, "it was not refused")
    assert joining.refused[-1].startswith(
        "a connection from 127.0.0.1 was refused: another key, or no agent;"
    )
    assert "127.0.0.1 was refused" in caplog.text


def test_stranger_cannot_let_the_controller_answer_for_it(joining: Joining) -> None:
    """It passes the challenge of one connection on as its own challenge in another one."""
    with stranger(joining) as asked, stranger(joining) as answering:
        challenge = Connection(os.dup(asked.fileno())).recv_bytes()
        other = Connection(os.dup(answering.fileno()))
        other.recv_bytes()
        other.send_bytes(challenge)
        assert other.recv_bytes() == b"#FAILURE#"
    wait_for_refusals(joining, 2)


class Executed:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_garbage_of_strangers_is_neither_executed_nor_kept(joining: Joining, tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps(Executed(made))
    kinds = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        os.urandom(1000),
        struct.pack("!i", len(pickled)) + pickled,
        struct.pack("!i", 2**31 - 1) + b"x" * 1000,
        struct.pack("!iQ", -1, 2**62) + b"x" * 1000,
        struct.pack("!i", -7),
        struct.pack("!i", 0),
    ]
    tracemalloc.start()
    for number, sent in enumerate(kinds, 1):
        with stranger(joining) as connected:
            with contextlib.suppress(OSError):  # it was refused at once
                connected.sendall(sent)
                connected.shutdown(socket.SHUT_WR)
            wait_for_refusals(joining, number)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20
    assert not made.exists()
    assert "welcome" in Agent(joining).answer


def test_a_thousand_strangers_keep_nobody_out(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest strangers are refused because they are too many, not because they are slow."""
    monkeypatch.setattr("ddpperf.node.listener.HANDSHAKE_SECONDS", math.inf)
    monkeypatch.setattr("ddpperf.node.handshake.limit_pauses", lambda connected: None)
    with contextlib.ExitStack() as held:
        threads = threading.active_count()
        for _ in range(1000):
            held.enter_context(stranger(joining))
        assert "welcome" in Agent(joining).answer
        few = MOST_STRANGERS + 10
        wait_until(lambda: threading.active_count() - threads <= few, 10, lambda: "threads are left")
        wait_until(lambda: len(joining.refused) == 100, 10, lambda: "they were not refused")


@pytest.mark.slow
def test_agent_joins_once_threads_can_be_started_again(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection needs a thread when this user may start no more."""
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def start_but_once(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_once)
    with socket.create_connection(("127.0.0.1", joining.port), timeout=9) as stranger:
        assert stranger.recv(1) == b"", "its connection was closed"
    assert "welcome" in Agent(joining).answer


def test_slow_stranger_is_refused_in_time(joining: Joining) -> None:
    began = time.monotonic()
    with stranger(joining) as connected, contextlib.suppress(OSError):
        connected.sendall(struct.pack("!i", 200))
        while time.monotonic() - began < 20:
            connected.sendall(b"x")  # each byte within the limit of a read
            time.sleep(0.3)
    assert time.monotonic() - began < 8
    assert joining.refused


def test_key_holder_that_says_nonsense_is_refused(joining: Joining) -> None:
    for nonsense in (b"", b"null", b"{}", b'{"name": "b"}', b"x" * 2**17):
        count = len(joining.refused)
        connection = connect(("127.0.0.1", joining.port), KEY)
        with contextlib.suppress(OSError):
            connection.send_bytes(nonsense)
        wait_for_refusals(joining, count + 1)
        connection.close()


# --- the agent's command line


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--seconds", "0"]) == REFUSED
    return capsys.readouterr().err


@pytest.mark.parametrize("join", ["localhost", "localhost:", ":29511", "localhost:0", "localhost:99999"])
def test_join_without_port_is_refused(capsys: pytest.CaptureFixture[str], join: str) -> None:
    assert "--join must be HOST:PORT of the first node, got" in refusal(capsys, "--join", join)


def key_refusal(capsys: pytest.CaptureFixture[str], key: Path) -> str:
    return refusal(capsys, "--join", "127.0.0.1:1", "--key", str(key))


def test_missing_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory); copy" in key_refusal(capsys, tmp_path / "no")


def test_folder_as_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read (Is a directory); copy" in key_refusal(capsys, tmp_path)


def test_key_that_others_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    assert "has mode 0644, so others may read it; run chmod 600" in key_refusal(capsys, tmp_path / "key")


@pytest.mark.parametrize("text", ["", "ab" * 31, "no hexadecimal digits" * 3])
def test_short_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(text)
    assert "holds no key of 64 hexadecimal digits" in key_refusal(capsys, tmp_path / "key")


def test_new_key_is_private(tmp_path: Path) -> None:
    make_key(tmp_path / "folder" / "key")
    assert (tmp_path / "folder" / "key").stat().st_mode & 0o777 == 0o600
    first = read_key(tmp_path / "folder" / "key")
    make_key(tmp_path / "folder" / "key")
    assert read_key(tmp_path / "folder" / "key") == first


def test_agent_with_another_key_says_so(
    capsys: pytest.CaptureFixture[str], joining: Joining, tmp_path: Path
) -> None:
    make_key(tmp_path / "key")
    said = refusal(capsys, "--join", f"127.0.0.1:{joining.port}", "--key", str(tmp_path / "key"))
    where = f"127.0.0.1:{joining.port}"
    assert said == f"ddpperf.node: pytest at {where} has another key; copy the first node's key file here\n"


def test_agent_without_controller_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    said = refusal(capsys, "--join", "127.0.0.1:1", "--key", str(tmp_path / "key"))
    assert "no run answers at 127.0.0.1:1 (Connection refused); start `pytest perf/ --nodes N` on" in said


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.2\r\n", struct.pack("!i", 4) + b"abcd"])
def test_agent_that_meets_another_program_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, banner: bytes
) -> None:
    make_key(tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as connected:
                connected.sendall(banner)
                connected.recv(100)

        threading.Thread(target=greet, daemon=True).start()
        port = server.getsockname()[1]
        said = refusal(capsys, "--join", f"127.0.0.1:{port}", "--key", str(tmp_path / "key"))
    assert said.count("\n") == 1
    assert "no run answers" in said or "another key" in said


@pytest.mark.parametrize("says_goodbye", [False, True])
def test_agent_whose_controller_ends_at_once_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, says_goodbye: bool
) -> None:
    def end(hello: object, connection: Connection, peer: str) -> None:
        if says_goodbye:
            channel.send(connection, {"goodbye": True})
        connection.close()

    make_key(tmp_path / "key")
    listener = Listener(LOOPBACK, 0, read_key(tmp_path / "key"), end, lambda sentence, error: None)
    with contextlib.closing(listener):
        assert main(["--join", listener.address, "--key", str(tmp_path / "key")]) == LOST
    assert "contact lost: pytest on the first node has ended" in capsys.readouterr().err
