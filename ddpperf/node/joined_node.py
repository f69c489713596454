"""The controller's connection to the agent of another node."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from ddpperf.errors import first_line, short
from ddpperf.node.handshake import LOST_SECONDS, shut_down
from ddpperf.node.remote_rank import RemoteRank
from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.interpreter import Side

PING_SECONDS = 0.5
MOST_PROBLEM_LETTERS = 200  # of an agent's sentence on why its node cannot be used
FIRST_PINGS = 5  # at once after a node has joined, to measure its clock
SILENT = f"it was silent for {LOST_SECONDS:g} s: its agent is stopped, or the network is cut"

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The offset of another node's wall clock from the controller's, in seconds.

    The true offset lies within half a round trip of it (Cristian 1989). Durations never use it: each
    is the difference of two times of one process.
    """

    offset_seconds: float
    round_trip_seconds: float

    @property
    def error_seconds(self) -> float:
        return self.round_trip_seconds / 2


class JoinedNode:
    """Another node of the run, whose agent has joined.

    A thread listens to the agent and pings it. One lock guards all that both threads use. number:
    from 1; the controller's node is number 0. hello: the agent's first message. prepared: the agent's
    answer once its node is accepted, or None. lost: why the node can no longer be used, or "".
    clock: the best measurement of its wall clock so far.
    """

    def __init__(self, number: int, connection: Connection, hello: Message) -> None:
        self.number = number
        self.hello = hello
        self.prepared: Message | None = None
        self.lost = ""
        self.clock: Clock | None = None
        self._answer: Message | None = None  # to the question of `prepare`
        self._ranks: dict[str, RemoteRank] = {}  # by their tokens, until they are closed
        self._connection = connection
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    @property
    def name(self) -> str:
        """The name that the agent gave."""
        return short(str(self.hello["name"]))

    @property
    def is_usable(self) -> bool:
        return self.prepared is not None and not self.lost

    @property
    def cores(self) -> list[list[int]] | None:
        """The CPU cores to pin each rank of the node to, or None."""
        return None if self.prepared is None else self.prepared.get("cores")

    @property
    def advice(self) -> str:
        return f"start the agent of node {self.number} ({self.name}) again; it then rejoins the run"

    def start(self, welcome: Message) -> None:
        """Welcome the agent, and begin to listen to it."""
        self.tell({"welcome": {"node": self.number, **welcome}})
        self._thread.start()

    # --- used by the thread of the tests

    def start_rank(
        self, rank: int, node_rank: int, *, set_name: str, side: Side, device: str, log_folder: Path | None
    ) -> RemoteRank:
        """Let the agent start a rank. `RemoteRank.connect` waits until the rank has connected."""
        started = RemoteRank(rank, self)
        with self._changed:
            self._ranks[started.token] = started
        described = {
            "name": side.name,
            "python": None if side.python == sys.executable else side.python,
            "root": None if side.root is None else str(side.root),
            "environment": dict(side.environment),
        }
        self.tell(
            {
                "start": started.token,
                "rank": rank,
                "node_rank": node_rank,
                "set": set_name,
                "side": described,
                "device": device,
                "log_folder": None if log_folder is None else os.path.abspath(log_folder),
            }
        )
        return started

    def prepare(self, seconds: float) -> Message | None:
        """Let the agent prepare its node, and return its answer, or None if none came in time."""
        self.tell({"prepare": True})
        return self.wait_for(lambda: self._answer, seconds)

    def tell(self, message: Message) -> None:
        """Send a message to the agent. A broken connection loses the node."""
        if self.lost:
            return
        try:
            with self._changed:
                channel.send(self._connection, message)
        except BlockingIOError:
            self.lose(SILENT)
        except ConnectionError:
            self.lose("its agent has ended")
        except OSError as error:
            self.lose(f"its agent cannot be reached ({error.strerror or 'closed'})")

    def wait_for(self, find: Callable[[], Found | None], seconds: float) -> Found | None:
        """Wait until `find` returns something true, the node is lost, or the time is over."""
        found: Found | None = None

        def is_over() -> bool:
            nonlocal found
            found = find()
            return bool(found) or bool(self.lost)

        with self._changed:
            self._changed.wait_for(is_over, seconds)
        return found

    def take(self, token: str, connection: Connection) -> bool:
        """Take the connection of a rank, which the agent has made for it.

        Returns False if the rank is not expected, or no longer.
        """
        with self._changed:
            rank = self._ranks.get(token)
            if self.lost or rank is None or rank.channel is not None:
                return False
            rank.channel = connection
            self._changed.notify_all()
            return True

    def forget(self, rank: RemoteRank) -> None:
        """Close the connection of a rank, and let it connect no more."""
        with self._changed:
            self._ranks.pop(rank.token, None)
            if rank.channel is not None:
                rank.channel.close()

    def lose(self, why: str) -> None:
        """Give the node up: end all its connections, which ends its ranks, too."""
        with self._changed:
            if self.lost:
                return
            self.lost = why
            for connection in (self._connection, *(rank.channel for rank in self._ranks.values())):
                if connection is not None:
                    shut_down(connection)
            self._changed.notify_all()

    def close(self) -> None:
        """Say goodbye to the agent, which then ends its ranks and itself."""
        self.tell({"goodbye": True})
        self.lose("the run has ended")
        if self._thread.is_alive():  # the run may end before the agent is welcomed
            self._thread.join(LOST_SECONDS)

    # --- the thread that listens

    def _listen(self) -> None:
        """Listen to the agent until the node is lost, then close the connection."""
        self._listen_until_lost()
        with self._changed:
            self._connection.close()

    def _listen_until_lost(self) -> None:
        heard = time.monotonic()
        pinged, pings = 0.0, 0
        sent: dict[int, tuple[float, float]] = {}  # when the last ping was sent: wall clock, own clock
        while not self.lost:
            now = time.monotonic()
            if pings < FIRST_PINGS or now - pinged >= PING_SECONDS:
                pings, pinged = pings + 1, now
                sent = {pings: (time.time(), time.perf_counter())}
                self.tell({"ping": pings})
            try:
                if self._connection.poll(PING_SECONDS / 2):
                    message = channel.receive(self._connection)
                    heard = time.monotonic()
                    self._receive(message, sent)
                elif time.monotonic() - heard > LOST_SECONDS:
                    return self.lose(SILENT)
            except (EOFError, ConnectionResetError):
                return self.lose("its agent has ended")
            except (BlockingIOError, TimeoutError):
                return self.lose(SILENT)
            except OSError as error:
                return self.lose(f"its connection broke ({error.strerror or error})")
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                return self.lose(f"its agent sent a message that pytest cannot read ({first_line(error)})")
        return None

    def _receive(self, message: Message, sent: dict[int, tuple[float, float]]) -> None:
        with self._changed:
            if "leaving" in message:
                self.lose(f"its agent was ended by {short(str(message['leaving']))}")
            elif "pong" in message:
                self._measure_clock(sent.get(message["pong"]), float(message["time"]))
            elif "prepare" in message:
                self._answer = _checked_answer(message["prepare"])
            elif (rank := self._ranks.get(message["rank"])) is None:
                pass  # its process set has ended meanwhile
            elif "ended" in message:
                rank.ended = {"what": short(str(message["what"])), "detail": str(message["detail"])}
            else:
                rank.printed = str(message["stacks"])
            self._changed.notify_all()

    def _measure_clock(self, sent: tuple[float, float] | None, theirs: float) -> None:
        """Keep the offset of the ping with the shortest round trip, which is the most exact."""
        if sent is None:
            return
        round_trip = time.perf_counter() - sent[1]
        if self.clock is None or round_trip < self.clock.round_trip_seconds:
            offset = theirs - (sent[0] + round_trip / 2)
            self.clock = Clock(offset_seconds=offset, round_trip_seconds=round_trip)


def _checked_answer(answer: Message) -> Message:
    """Return an agent's answer to the question of `prepare`, or raise an error for any other value."""
    cores = answer["cores"]
    if not all(isinstance(answer[name], str) for name in ("problem", "digest")):
        raise TypeError("problem and digest must be texts")
    if cores is not None and not all(type(core) is int and core >= 0 for rank in cores for core in rank):
        raise TypeError("cores must be the numbers of the cores of each rank")
    problem = short(answer["problem"], MOST_PROBLEM_LETTERS)
    return {**answer, "problem": problem, "digest": short(answer["digest"])}
