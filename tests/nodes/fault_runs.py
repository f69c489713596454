"""Faults of nodes at random moments, in network namespaces, and what is reported of each.

    python -m tests.nodes.fault_runs --count 100 --seed 1

The controller and one agent run in a namespace each. After each fault the failure must name the
node, the rank and the cause in time, nothing may be left on either side, a fresh agent must join,
and the next measurement must be right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ddpperf.node.handshake import LOST_SECONDS
from tests.faults.outcomes import Outcome, table
from tests.namespaces import INTERFACE, Nodes, nodes
from tests.project import REPOSITORY, Marked, wait_until

NODE = 1  # the number of the agent's node
DEADLINE_SECONDS = 3.0  # of a measurement whose rank is stopped
SLOW_SECONDS = 30.0  # the deadline of other measurements
AT_ONCE, LATE = 0.5, 2.0  # seconds until a death is reported; until a hang is, after its deadline
ANSWER_SECONDS = 60.0
MOMENTS = ("idle", "start", "setup", "join", "open", "sample", "close")
LONG = {"start": 0.1, "setup": 1.5, "join": 0.1, "open": 0.05, "sample": 1.0, "close": 0.02, "idle": 0.5}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault: what is done to whom, and what must be reported of it within some seconds."""

    name: str
    cause: str
    seconds: float
    signal: int = 0
    to: str = "agent"
    cut: tuple[bool, bool] | None = None  # frames from the node, and to the node
    deadline: float = SLOW_SECONDS
    moments: tuple[str, ...] = MOMENTS


SILENT = r"was silent for 5 s"
KINDS = (
    Kind(name="kill -9 of agent", signal=signal.SIGKILL, cause="its agent has ended", seconds=AT_ONCE),
    Kind(name="SIGTERM of agent", signal=signal.SIGTERM, cause="ended by SIGTERM", seconds=AT_ONCE),
    Kind(name="SIGHUP of agent", signal=signal.SIGHUP, cause="ended by SIGHUP", seconds=AT_ONCE),
    Kind(name="Ctrl-C of agent", signal=signal.SIGINT, cause="ended by SIGINT", seconds=AT_ONCE),
    Kind(name="SIGSTOP of agent", signal=signal.SIGSTOP, cause=SILENT, seconds=LOST_SECONDS + LATE),
    Kind(
        name="kill -9 of rank", signal=signal.SIGKILL, to="rank", cause="killed by SIGKILL", seconds=AT_ONCE
    ),
    Kind(
        name="SIGSTOP of rank",
        signal=signal.SIGSTOP,
        to="rank",
        cause="did not answer within 3 s",
        seconds=DEADLINE_SECONDS + LATE,
        deadline=DEADLINE_SECONDS,
        moments=("idle", "join", "open", "sample", "close"),  # the set-up has a deadline of its own: 120 s
    ),
    Kind(name="cut in both directions", cut=(True, True), cause=SILENT, seconds=LOST_SECONDS + LATE),
    Kind(name="cut to the node", cut=(False, True), cause=SILENT, seconds=LOST_SECONDS + LATE),
    Kind(name="cut from the node", cut=(True, False), cause=SILENT, seconds=LOST_SECONDS + LATE),
    Kind(name="late join", to="late", cause="was lost", seconds=10.0),
    Kind(name="second agent, same name", to="twice", cause="node b has joined already", seconds=10.0),
    Kind(name="agent too many", to="more", cause="all 2 nodes have joined", seconds=10.0),
)


def _handle_signals() -> None:
    """Let SIGHUP and SIGINT end this new process, even if its parent ignores them, as under nohup."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class FaultRun:
    """A controller and agents in a namespace each. Faults happen to the first agent."""

    def __init__(self, made: Nodes, marks: Sequence[Marked], count: int = 2) -> None:
        self._nodes, self._marks = made, marks
        self._files = Path(tempfile.mkdtemp(prefix="f", dir=marks[0].locks))
        self._controller = made.start(
            0,
            [sys.executable, "-m", "tests.nodes.controlled", str(self._files), INTERFACE, str(count)],
            env=marks[0].environment,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._files / "errors").open("w"),
        )
        self._text = ""
        where = self.until("port")
        self._join = f"{where['address']}:{where['port']}"
        self.agent = self.start_agent()
        self._others = [self.start_agent(f"node{node}", node) for node in range(2, count)]
        self.wait()

    # --- the controller and agents

    def send(self, command: str, **arguments: Any) -> None:
        assert self._controller.stdin
        self._controller.stdin.write(json.dumps([command, arguments]) + "\n")
        self._controller.stdin.flush()

    def until(self, *wanted: str) -> dict[str, Any]:
        """Return the controller's next line with one of these keys."""
        assert self._controller.stdout
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end:
            line, newline, rest = self._text.partition("\n")
            if newline:
                self._text = rest
                found: dict[str, Any] = json.loads(line)
                if found.keys() & set(wanted):
                    return found
                continue
            if select.select([self._controller.stdout], [], [], 1.0)[0]:
                read = os.read(self._controller.stdout.fileno(), 2**16).decode()
                assert read, f"the controller has ended: {(self._files / 'errors').read_text()}"
                self._text += read
        raise AssertionError(f"no {wanted} came; {(self._files / 'errors').read_text()[-2000:]}")

    def start_agent(self, name: str = "b", node: int = NODE) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ddpperf.node", "--join", self._join, "--name", name]
        return self._nodes.start(
            node,
            [*command, "--key", str(self._files / "node.key"), "--seconds", "20"],
            env=self._marks[node].environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_handle_signals,
        )

    def wait(self) -> float:
        self.send("wait", seconds=20.0)
        found = self.until("joined", "refused")
        assert "joined" in found, found
        return float(found["joined"])

    def measure(
        self, *, ranks: int = 2, rounds: int = 2, deadline: float = SLOW_SECONDS, fresh: bool
    ) -> None:
        self.send("measure", ranks=ranks, rounds=rounds, deadline=deadline, fresh=fresh)

    def rank(self) -> psutil.Process:
        """Wait for the agent's rank, and return it."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(self.agent.pid).children()
            found.extend(child for child in children if "bootstrap.py" in " ".join(child.cmdline()))
            return bool(found)

        wait_until(is_there, 20, lambda: "no rank has started")
        return found[0]

    # --- faults

    def fault(self, kind: Kind, moment: str, delay: float) -> Outcome:
        """Let a fault happen, and return what came of it. delay: seconds after the moment begins."""
        if kind.to in ("late", "twice", "more"):
            return self._joining_fault(kind, moment, delay)
        self._reach(kind, moment, delay)
        began = time.monotonic()
        self._inject(kind)
        if moment != "idle":
            found = self.until("measured", "failure")
        if moment == "idle" or "measured" in found:  # the fault came after the last command
            moment = "idle"
            if kind.name == "SIGSTOP of rank":  # which the next command finds
                began = time.monotonic()
                self.measure(deadline=kind.deadline, fresh=False)
            else:
                self.send("watch", seconds=kind.seconds + 2)
            found = self.until("measured", "failure")
        failure = str(found.get("failure", "nothing was reported"))
        seconds = found["time"] - began
        names_node = re.search(r"node 1 \(b\)|node b was lost", failure) is not None
        return Outcome(
            fault=kind.name,
            moment=moment,
            seconds=seconds,
            limit_seconds=kind.seconds,
            report=failure,
            is_named=names_node and re.search(kind.cause, failure) is not None,
            left=self._left_behind(kind),
            is_next_right=self._go_on(),
        )

    def _reach(self, kind: Kind, moment: str, delay: float) -> None:
        """Begin a measurement, and wait until the fault is due."""
        self.measure(rounds=8, deadline=kind.deadline, fresh=True)
        if moment == "idle":
            self.until("measured")
        else:
            while self.until("at", "measured", "failure").get("at") != moment:
                continue
        time.sleep(delay)

    def _inject(self, kind: Kind) -> None:
        if kind.cut is not None:
            self._nodes.cut(NODE, outgoing=kind.cut[0], incoming=kind.cut[1])
        elif kind.to == "rank":
            self.rank().send_signal(kind.signal)
        else:
            self.agent.send_signal(kind.signal)

    def _left_behind(self, kind: Kind) -> tuple[str, ...]:
        """Return what is left on either side after a fault."""
        agent_stopped = kind.name == "SIGSTOP of agent"
        survivors = {self.agent.pid} if agent_stopped or kind.to == "rank" else set()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._alive() <= survivors, LOST_SECONDS + LATE, str)
        left = [f"running: {self._alive() - survivors}"] if self._alive() - survivors else []
        if agent_stopped:
            self.agent.send_signal(signal.SIGCONT)
        if kind.cut is not None:
            self._nodes.restore(NODE)
        if kind.to == "rank":
            self.agent.terminate()
        try:
            self.agent.wait(LOST_SECONDS + LATE)
        except subprocess.TimeoutExpired:
            left.append("the agent runs on")
            self.agent.kill()
        self.agent.communicate()
        if files := sorted(os.listdir(self._marks[1].folder)):
            left.append(f"on the node: {files}")
        return tuple(left)

    def _alive(self) -> set[int]:
        return {pid for pid in self._marks[1].processes() if psutil.pid_exists(pid)}

    def _go_on(self) -> bool:
        """Let a fresh agent join, and return whether the next measurement is right."""
        self.agent = self.start_agent()
        self.wait()
        return self._is_next_right()

    def _is_next_right(self) -> bool:
        self.measure(fresh=False)
        return bool(self.until("measured", "failure").get("measured", [0, 0])[1:] == [2])

    def _joining_fault(self, kind: Kind, moment: str, delay: float) -> Outcome:
        """Let an agent join late, twice, or one too many, while the run goes on."""
        ranks = 2
        if kind.to == "late":
            ranks = 1
            self.agent.kill()
            self.agent.communicate()
            self.send("watch", seconds=LATE)
            self.until("failure")
        self.measure(ranks=ranks, rounds=8, fresh=True)
        seen = self.until("at", "measured", "failure")
        while "at" in seen and seen["at"] != moment:
            seen = self.until("at", "measured", "failure")
        time.sleep(delay)
        began = time.monotonic()
        joining = self.start_agent("c" if kind.to == "more" else "b")
        wrong, output = "", ""
        if kind.to == "late":
            self.agent = joining
        else:
            output, _ = joining.communicate(timeout=20)
            if joining.returncode != 2 or kind.cause not in output:
                wrong = f"the agent said {output!r}, status {joining.returncode}"
        seconds = time.monotonic() - began
        if "at" in seen:
            seen = self.until("measured", "failure")
        if "measured" not in seen:
            wrong += f"; the run did not go on: {seen}"
        if kind.to == "late":
            self.wait()
            seconds = time.monotonic() - began
        return Outcome(
            fault=kind.name,
            moment=moment,
            seconds=seconds,
            limit_seconds=ANSWER_SECONDS,
            report=output,
            is_next_right=self._is_next_right(),
            wrong=wrong,
        )

    # --- ends

    def state(self) -> dict[str, Any]:
        """End the ranks, and return what the controller process holds."""
        self.send("state")
        found: dict[str, Any] = self.until("state")["state"]
        return found

    def close(self) -> None:
        self.send("close")
        self.until("closed")
        for agent in (self.agent, *self._others):
            output, _ = agent.communicate(timeout=10)
            assert agent.returncode == 0, output
        self._controller.communicate(timeout=10)
        for mark in self._marks:
            mark.assert_nothing_left()


@contextlib.contextmanager
def fault_run() -> Iterator[FaultRun]:
    marks = [Marked(), Marked()]
    try:
        with nodes(2) as made:
            run = FaultRun(made, marks)
            yield run
            run.close()
    finally:
        for mark in marks:
            mark.clean()


def run_faults(
    count: int, seed: int, kinds: Sequence[Kind] = KINDS, say: Callable[[str], None] = lambda line: None
) -> list[Outcome]:
    """Let `count` faults happen at random moments, and return what came of each."""
    chance, outcomes, held = random.Random(seed), [], []
    shared = set(os.listdir("/dev/shm"))
    with fault_run() as run:
        run.measure(fresh=True)
        run.until("measured")
        held.append(run.state())
        for number in range(count):
            kind = kinds[number % len(kinds)]
            moment = chance.choice(kind.moments)
            outcome = run.fault(kind, moment, chance.uniform(0, LONG[moment]))
            outcomes.append(replace(outcome, number=number // len(kinds)))
            held.append(run.state())
            say(outcomes[-1].line())
    say(f"held at first {held[0]['fds']} descriptors, {held[0]['threads']} threads; at last {held[-1]}")
    say(f"left in /dev/shm: {set(os.listdir('/dev/shm')) - shared or 'nothing'}")
    return outcomes


def join_seconds(count: int) -> float:
    """Return how long it takes until all nodes have joined, from the start of their processes."""
    marks = [Marked() for _ in range(count)]
    try:
        with nodes(count) as made:
            began = time.monotonic()
            run = FaultRun(made, marks, count)
            seconds = time.monotonic() - began
            run.measure(ranks=count, fresh=True)
            assert run.until("measured", "failure").get("measured") == [2, count]
            run.close()
            return seconds
    finally:
        for mark in marks:
            mark.clean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a pattern of the kinds of faults")
    given = parser.parse_args()
    chosen = [kind for kind in KINDS if re.search(given.only, kind.name)]
    print(table(run_faults(given.count, given.seed, chosen, lambda line: print(line, flush=True))))
