"""A rank on another node, as the controller process sees it through that node's agent."""

from __future__ import annotations

import time
import uuid
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ddpperf.node.handshake import shut_down
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.rank_process import STACKS_SECONDS

if TYPE_CHECKING:
    from ddpperf.node.joined_node import JoinedNode

CONNECT_SECONDS = 20.0  # from the request to the connection of a started rank
REPORT_SECONDS = 1.0  # from a closed connection to the agent's report of the rank's end


class RemoteRank:
    """The handle of one rank that a node's agent starts, watches and ends.

    token: names the rank in messages between the controller and the agent. where: the end of a
    sentence's subject, such as " on node 1 (b)". channel: the connection to the rank, or None until
    it has connected. ended: how it ended, or None. printed: the stacks of its threads.
    """

    def __init__(self, rank: int, node: JoinedNode) -> None:
        self.rank = rank
        self.token = uuid.uuid4().hex
        self.where = f" on node {node.number} ({node.name})"
        self.channel: Connection | None = None
        self.ended: dict[str, str] | None = None
        self.printed = ""
        self._node = node
        self._stacks_end = 0.0  # until then stacks may come

    @property
    def connection(self) -> Connection:
        """The connection to the rank, after `connect` has returned no failure."""
        assert self.channel is not None
        return self.channel

    def connect(self) -> RankFailure | None:
        """Wait until the rank's process has started and connected, or return why it has not."""
        self._node.wait_for(lambda: self.channel or self.ended, CONNECT_SECONDS)
        if self.channel is not None:
            return None
        if self.ended is not None:
            return self._failure(**self.ended)
        if self._node.lost:
            what = f"was not started, its node was lost: {self._node.lost}"
            return self._failure(what, self._node.advice)
        return self._failure(f"did not connect within {CONNECT_SECONDS:g} s")

    def is_dead(self) -> bool:
        return bool(self._node.lost) or self.ended is not None

    def death(self) -> RankFailure:
        """Return how the rank's process ended, as its agent reports, or why the node was lost."""
        if (end := self._node.wait_for(lambda: self.ended, REPORT_SECONDS)) is not None:
            return self._failure(**end)
        if self._node.lost:
            return self._failure(f"was lost: {self._node.lost}", self._node.advice)
        return self._failure("closed its connection before it answered, but runs on")

    def _failure(self, what: str, detail: str = "") -> RankFailure:
        return RankFailure(rank=self.rank, cause=Cause.DIED, what=what, detail=detail, where=self.where)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank's process has ended."""
        self._node.wait_for(lambda: self.ended, seconds)

    def kill(self) -> None:
        """Let the agent kill the rank, and end the connection, which ends the rank, too."""
        if self.ended is None:
            self._node.tell({"kill": self.token})
        if self.channel is not None:
            shut_down(self.channel)

    def close(self) -> None:
        """Close the connection to the rank, now or as soon as the rank connects."""
        self._node.forget(self)

    def ask_for_stacks(self) -> None:
        """Let the agent collect the stacks of all threads of this rank."""
        self.printed = ""
        self._stacks_end = time.monotonic() + 2 * STACKS_SECONDS
        self._node.tell({"stacks": self.token})

    def stacks(self) -> str:
        """Return the stacks that the agent collected, or an empty string if none have come."""
        left = max(0.0, self._stacks_end - time.monotonic())
        self._node.wait_for(lambda: self.printed, left)
        return self.printed
