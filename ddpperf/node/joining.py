"""Let the agents of other nodes join a run, and give their nodes numbers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from ddpperf.errors import Refused, short
from ddpperf.machine.network import Interface
from ddpperf.node.facts import Facts, require_equal
from ddpperf.node.handshake import shut_down
from ddpperf.node.joined_node import JoinedNode
from ddpperf.node.listener import LOG, Listener
from ddpperf.workers import channel
from ddpperf.workers.channel import Message

KEPT_REFUSALS = 100  # a port may be scanned for hours
PREPARE_SECONDS = 1800.0  # for an agent to decode a large data set


class Joining:
    """Lets the agents of other nodes join the run through a port of one interface.

    count: the number of nodes, with the controller's own. expected: the facts that must be equal on
    all nodes. welcome: what each agent must prepare. digest: the digest of the images on the
    controller's node. refused: a sentence for each of the last refusals. An agent that joins after a
    node was lost takes that node's place. Raises Refused if the port is in use.
    """

    def __init__(
        self,
        interface: Interface,
        port: int,
        key: bytes,
        *,
        count: int,
        expected: Facts,
        welcome: Message,
        digest: str,
    ) -> None:
        self.nodes: list[JoinedNode] = []
        self.refused: deque[str] = deque(maxlen=KEPT_REFUSALS)
        self._count, self._expected, self._welcome, self._digest = count, expected, welcome, digest
        self._changed = threading.Condition()
        self._closed = False
        self._listener = Listener(interface, port, key, self._take, self._refuse)

    @property
    def port(self) -> int:
        """The port that agents and their ranks connect to."""
        return self._listener.port

    @property
    def address(self) -> str:
        """The HOST:PORT that agents join."""
        return self._listener.address

    def wait(self, seconds: float, progress: Callable[[str], None]) -> None:
        """Wait until all nodes have joined. Raises Refused if that takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while (missing := self._count - 1 - len(self.joined())) > 0:
            left = end - time.monotonic()
            if left <= 0:
                why = f"; {self.refused[-1]}" if self.refused else ""
                waited = f"{missing} of {self._count} nodes did not join within {seconds:g} s{why}"
                start = f"start `python -m ddpperf.node --join {self.address}` there"
                advice = f"{start}, or pass a longer --node-seconds"
                raise Refused(f"--nodes {self._count}: {waited}; {advice}")
            progress(f"waiting for {missing} of {self._count} nodes, {left:.0f} s left")
            with self._changed:
                self._changed.wait(min(1.0, left))

    def joined(self) -> list[JoinedNode]:
        """Return the other nodes that have joined and are not lost."""
        return [node for node in self.nodes if node.is_usable]

    def close(self) -> None:
        """Send all agents home, and stop listening. May be called again."""
        with self._changed:
            self._closed = True
        self._listener.close()
        for node in self.nodes:
            node.close()

    # --- in the listener's threads

    def _take(self, hello: Message, connection: Connection, peer: str) -> None:
        """Take the agent or the rank that has connected."""
        try:
            if "rank" in hello:
                self._take_rank(hello, connection)
            else:
                self._take_agent(hello, connection, peer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            what = f"the agent at {peer} was refused: it ended, or sent a message that pytest cannot read"
            self._refuse(f"{what}; start it again with the same commit of ddpperf", error)
            connection.close()

    def _refuse(self, sentence: str, error: BaseException | None = None) -> None:
        LOG.warning("%s%s", sentence, "" if error is None else f" ({type(error).__name__})")
        self.refused.append(sentence)

    def _take_rank(self, hello: Message, connection: Connection) -> None:
        token = str(hello["rank"])
        if not any(node.take(token, connection) for node in self.nodes if node.number == hello["node"]):
            LOG.info("a rank of node %s connected too late, it ends", hello["node"])
            connection.close()

    def _take_agent(self, hello: Message, connection: Connection, peer: str) -> None:
        name = short(str(hello["name"]))
        try:
            require_equal(name, hello["facts"][self._welcome["device"]], self._expected)
            with self._changed:
                node = self._place(name, hello, connection)
        except Refused as refused:
            self._refuse(f"the agent of {name} ({peer}) was refused: {refused}")
            channel.send(connection, {"refused": str(refused)})
            shut_down(connection)
            connection.close()
            return
        node.start(self._welcome)
        answer = node.prepare(PREPARE_SECONDS)
        if answer is None:
            answer = {"problem": f"its agent did not prepare it ({node.lost or 'no answer'}); see its output"}
        problem = str(answer["problem"])
        if not problem and answer.get("digest") != self._digest:
            problem = f"the images on node {name} have the digest {answer.get('digest') or 'none'}, on the"
            problem += f" first node {self._digest or 'none'}; copy the first node's images there"
        if problem:
            node.tell({"refused": problem})
            node.lose(problem)
            self._refuse(f"the agent of {name} ({peer}) was refused: {problem}")
            return
        with self._changed:
            node.prepared = answer
            self._changed.notify_all()

    def _place(self, name: str, hello: Message, connection: Connection) -> JoinedNode:
        """Give an agent the number of its node: that of a lost node, or the next one."""
        if self._closed:
            raise Refused("the run has ended; start the agent again for the next run")
        if name in {node.name for node in self.nodes if not node.lost}:
            raise Refused(
                f"node {name} has joined already; end one of its two agents, or pass another --name"
            )
        lost = sorted((node for node in self.nodes if node.lost), key=lambda node: node.name != name)
        if lost:
            node = JoinedNode(lost[0].number, connection, hello)
            self.nodes[self.nodes.index(lost[0])] = node
        elif len(self.nodes) < self._count - 1:
            node = JoinedNode(len(self.nodes) + 1, connection, hello)
            self.nodes.append(node)
        else:
            raise Refused(
                f"all {self._count} nodes have joined; end this agent, or pass a larger --nodes to pytest"
            )
        return node
