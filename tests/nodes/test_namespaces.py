"""Network namespaces as nodes: delay, rate, cuts, and nothing left afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.namespaces import Nodes, ip, needs_namespaces, nodes

pytestmark = needs_namespaces
DELAY, RATE = 0.01, 12.5e6  # 10 ms and 100 Mbit/s: what a busy machine adds is small beside them
FRAME, PAYLOAD = 9014, 8948  # bytes: Ethernet 14, IP 20, TCP 20 and timestamps 12
SLOW_START, COPIED = 10**6, 3 * 10**6  # bytes: TCP reaches the rate after the first

SERVER = f"""
import socket, time
server = socket.create_server(("10.77.0.1", 5000))
print(flush=True)
while True:
    client, _ = server.accept()
    received = 0
    while received < {COPIED}:
        if received < {SLOW_START}:
            start, first = time.perf_counter(), received
        received += len(client.recv(2**16))
    print((received - first) / (time.perf_counter() - start), flush=True)
"""
CLIENT = f"""
import socket
client = socket.create_connection(("10.77.0.1", 5000))
client.sendall(bytes({COPIED}))
"""
# A port on which nobody listens: the kernels alone ask and refuse, which takes one round trip.
PING = """
import socket, time
for _ in range(20):
    start = time.perf_counter()
    socket.socket().connect_ex(("10.77.0.1", 5002))
    print(time.perf_counter() - start)
"""
LISTEN = """
import socket
listener = socket.socket(type=socket.SOCK_DGRAM)
listener.bind(("", 5001))
print(flush=True)
while True:
    print(listener.recv(99).decode(), flush=True)
"""
SEND = """
import socket, sys
address, text = sys.argv[1:]
socket.socket(type=socket.SOCK_DGRAM).sendto(text.encode(), (address, 5001))
"""


@pytest.fixture(scope="module")
def pair(namespaces_allowed: None) -> Iterator[Nodes]:
    with nodes(2, delay_seconds=DELAY, bytes_per_second=RATE) as made:
        yield made


def python(made: Nodes, node: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    return made.start(node, [sys.executable, "-ISc", code, *arguments], stdout=subprocess.PIPE)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline().strip()
    assert line or process.poll() is None, "the process ended"
    return line


def test_ping_takes_twice_the_delay(pair: Nodes) -> None:
    """The fastest of many, because the switch is a process, which a busy machine wakes late."""
    pings = [float(ping) for ping in python(pair, 1, PING).communicate()[0].split()]
    assert len(pings) == 20
    assert 1.98 * DELAY <= min(pings) < 2.9 * DELAY  # another delay more or less would be 1 or 3


def test_copies_take_the_rate(pair: Nodes) -> None:
    server = python(pair, 0, SERVER)
    first_line(server)
    rates = []
    for _ in range(3):
        python(pair, 1, CLIENT).communicate()
        rates.append(float(first_line(server)))
    assert max(rates) * FRAME / PAYLOAD == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize(
    ("cut", "arrives"),
    [
        pytest.param({"incoming": False}, "to 1", id="outgoing"),
        pytest.param({"outgoing": False}, "to 0", id="incoming"),
        pytest.param({}, "", id="both"),
    ],
)
def test_a_cut_stops_only_its_direction(pair: Nodes, cut: dict[str, bool], arrives: str) -> None:
    """A datagram each way: the first one and the last one arrive, those in between if allowed."""
    listeners = [python(pair, node, LISTEN) for node in (0, 1)]
    for listener in listeners:
        first_line(listener)

    def send(text: str) -> None:
        for sender in (0, 1):
            python(pair, sender, SEND, pair.addresses[1 - sender], f"{text} {1 - sender}").communicate()

    send("before")
    pair.cut(1, **cut)
    send("to")
    pair.restore(1)
    send("after")
    received = [first_line(listener) for listener in listeners for _ in range(2)]
    received += [first_line(listeners[int(line[-1])]) for line in received if line.startswith("to")]
    for listener in listeners:
        listener.kill()
        listener.communicate()
    ends = {"before 0", "before 1", "after 0", "after 1"}
    assert sorted(received) == sorted(ends | {arrives} - {""})


MAKER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.namespaces import nodes
with nodes(1) as made:
    made.start(0, ["sleep", "60"])
    print(made.names[0], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_test_leaves_no_node(end: signal.Signals, namespaces_allowed: None) -> None:
    """Ctrl-C removes nodes at once; what a killed process left is removed at the next start."""
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    name = first_line(maker)
    assert name in ip("netns", "list")
    maker.send_signal(end)
    maker.wait()
    if end == signal.SIGKILL:
        assert name in ip("netns", "list")
        with nodes(1):
            pass
    assert name not in ip("netns", "list")
    maker.communicate(timeout=10)  # ends when no process of the node has its output open any more
