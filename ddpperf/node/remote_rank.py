"""A rank on another node, as the controller process sees it through that node's agent."""

from __future__ import annotations

import time
import uuid
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ddpperf.node.handshake import shut_down
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.rank_process import EXIT_SECONDS, STACKS_SECONDS

if TYPE_CHECKING:
    from ddpperf.node.joined_node import JoinedNode

CONNECT_SECONDS = 20.0  # from the request to the connection of a started rank
REPORT_SECONDS = 1.0  # from a closed connection to the agent's report of the rank's end


class RemoteRank:
    """The handle of one rank that a node's agent starts, watches and ends.

    token: names the rank in messages between the controller and the agent. where: the end of a
    sentence's subject, such as " on node 1 (b)".
    """

    connection: Connection

    def __init__(self, rank: int, node: JoinedNode) -> None:
        self.rank = rank
        self.token = node.expect(uuid.uuid4().hex)
        self.where = f" on node {node.number} ({node.name})"
        self._node = node
        self._stacks_end = 0.0  # until then stacks may come

    def connect(self) -> RankFailure | None:
        """Wait until the rank's process has started and connected, or return why it has not."""
        node, token = self._node, self.token
        node.wait_for(lambda: token in node.channels or token in node.ends, CONNECT_SECONDS)
        if (connection := node.channels.pop(token, None)) is not None:
            self.connection = connection
            return None
        if end := node.ends.get(token):
            return self._failure(end["what"], end["detail"])
        if node.lost:
            return self._failure(f"was not started, its node was lost: {node.lost}", node.advice)
        return self._failure(f"did not connect within {CONNECT_SECONDS:g} s")

    def is_dead(self) -> bool:
        return bool(self._node.lost) or self.token in self._node.ends

    def death(self) -> RankFailure:
        """Return how the rank's process ended, as its agent reports, or why the node was lost."""
        end = self._node.wait_for(lambda: self._node.ends.get(self.token), REPORT_SECONDS)
        if end is not None:
            return self._failure(end["what"], end["detail"])
        if self._node.lost:
            return self._failure(f"was lost: {self._node.lost}", self._node.advice)
        return self._failure("closed its connection before it answered, but runs on")

    def _failure(self, what: str, detail: str = "") -> RankFailure:
        return RankFailure(rank=self.rank, cause=Cause.DIED, what=what, detail=detail, where=self.where)

    def wait(self) -> None:
        """Wait at most EXIT_SECONDS until the rank's process has ended."""
        self._node.wait_for(lambda: self._node.ends.get(self.token), EXIT_SECONDS)

    def kill(self) -> None:
        """Let the agent kill the rank, and end the connection, which ends the rank, too."""
        if self.token not in self._node.ends:
            self._node.tell({"kill": self.token})
        if hasattr(self, "connection"):
            shut_down(self.connection)

    def close(self) -> None:
        """Close the connection to the rank, now or as soon as the rank connects."""
        self._node.forget(self.token)
        if hasattr(self, "connection"):
            self.connection.close()

    def ask_for_stacks(self) -> None:
        """Let the agent collect the stacks of all threads of this rank."""
        self._node.stacks.pop(self.token, None)
        self._stacks_end = time.monotonic() + 2 * STACKS_SECONDS
        self._node.tell({"stacks": self.token})

    def stacks(self) -> str:
        """Return the stacks that the agent collected, or an empty string if none have come."""
        left = max(0.0, self._stacks_end - time.monotonic())
        self._node.wait_for(lambda: self.token in self._node.stacks, left)
        return self._node.stacks.get(self.token, "")
