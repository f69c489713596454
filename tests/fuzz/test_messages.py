"""Hostile messages through real sockets: of ranks, of the agents of other nodes, and of strangers.

Nothing in them is executed, the memory stays bounded, and the rank or the node is named. Run the
long one, which `make test-all` includes, by `python -m pytest tests/fuzz -m slow`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ddpperf.machine.network import find_interface
from ddpperf.node.handshake import connect
from ddpperf.node.joined_node import JoinedNode
from ddpperf.node.joining import Joining
from ddpperf.workers import channel
from ddpperf.workers.answers import OPTIONAL
from ddpperf.workers.channel import MOST_BYTES
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.fuzz.fuzzing import BOTH, as_bytes, damaged_bytes, fuzz, mutations, require_sentence, values

DEADLINE = 60.0  # of an answer, which a busy machine does not reach
LONGEST_SECONDS = 20  # until the end of a connection is noticed
MOST_MEMORY = 100e6  # bytes for one message
ANSWERS: dict[str, dict[str, Any]] = {  # right answers of a rank by command
    "setup": {
        "port": 29500,
        "environment": {"torch": "2.14.1", "python": "3.11"},
        "can_skip_untimed": True,
        "can_finish": True,
    },
    "join": {},
    "open": {"max_iterations": 100, "kernels": "0123"},
    "sample": {"seconds": 0.5},
    "finish": {"counters": {"graph_slowdown": 1.0}},
    "close": {"counters": {"peak_memory_bytes": 1.0}, "kernels": "0123"},
    "leave": {},
}
ERROR = {"error": {"summary": "ValueError: x", "traceback": "...", "distributed": False, "limit": False}}
AGENT: list[dict[str, Any]] = [  # messages of an agent
    {"pong": 1, "time": 1.0e9},
    {"prepare": {"problem": "", "digest": "d1", "cores": [[0], [1]]}},
    {"rank": "token", "ended": True, "what": "was killed", "detail": ""},
    {"rank": "token", "stacks": "File x"},
    {"leaving": "SIGTERM"},
]


class Executed:
    """An object whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


def framed(content: bytes) -> bytes:
    return struct.pack("!i", len(content)) + content


def hostile(answers: list[dict[str, Any]], code: bytes, most: int = 2**20) -> st.SearchStrategy[bytes]:
    """Bytes on a connection: mutated answers, other JSON, code, and frames with another length.

    most: the most bytes of a frame.
    """
    large = (b"[" * 100_000, b"{" * 1000, b'{"a":' * 50_000, b"[" + b"[]," * 300_000)
    contents = st.one_of(
        *(mutations(answer).map(as_bytes) for answer in answers),
        *(damaged_bytes(json.dumps(answer).encode()) for answer in answers),
        values.map(as_bytes),
        st.binary(max_size=60),
        st.sampled_from([code, *(content[:most] for content in large)]),
    )
    lengths = st.sampled_from([-1, 0, 1, 5, MOST_BYTES, MOST_BYTES + 1, 2**31 - 1, -(2**31)])
    wrong = st.builds(lambda length, content: struct.pack("!i", length) + content, lengths, contents)
    return st.one_of(contents.map(framed), contents.map(framed), wrong, st.binary(max_size=6))


@contextlib.contextmanager
def sending(content: bytes) -> Iterator[Connection]:
    """Yield a connection on which a content arrives, and then its end."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, contextlib.suppress(OSError):  # the reader has seen enough
            theirs.sendall(content)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield Connection(ours.detach())
    finally:
        sender.join(LONGEST_SECONDS)
        assert not sender.is_alive()


class SilentRank:
    """A rank without a process: all that it does is what arrives on its connection."""

    where = ""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection

    def is_dead(self) -> bool:
        return False

    def connect(self) -> None:
        pass

    def death(self) -> RankFailure:
        return RankFailure(rank=self.rank, cause=Cause.DIED, what="closed its connection", detail="")

    def wait(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.connection.close()

    def ask_for_stacks(self) -> None:
        pass

    def stacks(self) -> str:
        return "stacks"


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY, f"{peak / 1e6:,.0f} MB"


@BOTH
def test_message_of_a_rank_is_used_or_names_it(profile: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    code = pickle.dumps(Executed(mark))
    inputs = st.one_of(
        *(
            st.tuples(st.just(command), hostile([answer, ERROR, {"progress": 0.5}], code))
            for command, answer in ANSWERS.items()
        )
    )
    options = SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=DEADLINE)

    def check(asked: tuple[str, bytes]) -> None:
        command, content = asked
        right = framed(json.dumps(ANSWERS[command]).encode())
        with sending(right) as first, sending(content) as second:
            ranks = ProcessSet("A1", Side(), options)
            ranks.ranks = [SilentRank(0, first), SilentRank(1, second)]
            ranks._pending = command, ranks.ranks
            try:
                with bounded_memory():
                    answers = ranks.answers(progress=require_number)
            except SetFailure as failure:
                require_rank_1(failure)
            else:
                json.dumps(answers, allow_nan=False)
                assert answers[1].keys() >= ANSWERS[command].keys() - OPTIONAL.keys()
            finally:
                ranks.kill()

    fuzz(profile, inputs, check, short=100, long=10_000)
    assert not mark.exists()


@BOTH
def test_hello_of_an_agent_is_used_or_refused(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an agent that knows the key. Afterwards a right agent still joins."""
    mark, key, facts = tmp_path / "executed", bytes(32), {"torch": "2.13.0", "GPU driver": "none"}
    hello = {"name": "b", "facts": {"cpu": facts}, "interface": "lo"}
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_value))
    joining = Joining(
        find_interface("lo"), 0, key, count=2, expected=facts, welcome={"device": "cpu"}, digest=""
    )

    def check(content: bytes) -> None:
        with connect(("127.0.0.1", joining.port), key) as connection, contextlib.suppress(OSError):
            os.write(connection.fileno(), content)
            end_sending(connection)
            while connection.poll(LONGEST_SECONDS) and os.read(connection.fileno(), 2**16):
                pass  # until the controller has closed the connection
        assert not raised
        for sentence in joining.refused:
            require_sentence(sentence)

    inputs = hostile([hello, {"rank": "token", "node": 1}], pickle.dumps(Executed(mark)), most=2**16)
    with contextlib.closing(joining):
        fuzz(profile, inputs, check, short=30, long=1000)
        with connect(("127.0.0.1", joining.port), key) as connection:
            channel.send(connection, hello)
            assert "welcome" in channel.receive(connection)
    assert not mark.exists()


def end_sending(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        connected.shutdown(socket.SHUT_WR)


def require_rank_1(failure: SetFailure) -> None:
    sentence, *_ = str(failure).split("\n")
    require_sentence(sentence)
    assert sentence.startswith("rank 1 of set A1 ")
    assert [failed.rank for failed in failure.failures] == [1]


def require_number(fraction: float) -> None:
    assert isinstance(fraction, int | float)


@BOTH
def test_message_of_an_agent_is_used_or_loses_it(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception ends the thread that listens, and the node's ranks are not waited for."""
    mark = tmp_path / "executed"
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_value))

    def check(content: bytes) -> None:
        with sending(content) as connection:
            node = JoinedNode(1, connection, {"name": "b"})
            with bounded_memory():
                node.start({})
                node._thread.join(LONGEST_SECONDS)
            assert not node._thread.is_alive()
        assert not raised
        require_sentence(f"node {node.name} was lost: {node.lost}")
        if (answer := node._answer) is not None:
            assert isinstance(answer["problem"], str)

    fuzz(profile, hostile(AGENT, pickle.dumps(Executed(mark))), check, short=50, long=2000)
    assert not mark.exists()
