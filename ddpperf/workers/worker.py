"""The main program of a rank, which carries out the commands of the controller process.

rank_entry.py starts this program, also that of another version of ddpperf, so this file must keep its
name and the arguments of `main`. Standard input is the channel to the controller. It closes when
the controller ends, which ends the rank, too, whatever its main thread waits for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.errors import CannotTrain
from ddpperf.io.private_folders import hold, remove_folder
from ddpperf.workers import channel
from ddpperf.workers.failures import COLLECTIVE

OWN_FOLDER_VARIABLE = "DDPPERF_OWN_FOLDER"  # set if the rank shares its private folder with no other rank
DEADLINE_VARIABLE = "DDPPERF_DEADLINE_SECONDS"  # of a command: the rank then prints its stacks
REPORT_SECONDS = 1.0
COLLECTIVE_SECONDS = 0.1  # from the stacks to the collective
MOST_LETTERS = 2**16  # of an error, whose message may be as long as a tensor
EXPLAINED = (CannotTrain, FloatingPointError)  # errors whose message needs no traceback
LIMITS = (RuntimeError, MemoryError, OverflowError)  # raised for too little memory or too small indices


def main(folder: str, rank: int) -> None:
    """Carry out the controller's commands until the controller sends "exit" or ends."""
    connection = Connection(os.dup(0))
    lasting = os.dup(0)  # never closed, so that the connection ends when this process has ended
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # nothing else reads from the channel
    lifeline = threading.Thread(target=_die_with_controller, args=(lasting, Path(folder)), daemon=True)
    lifeline.start()
    with contextlib.suppress(OSError):  # the controller has ended, and the folder is gone
        hold(Path(folder))  # until this process ends
    from ddpperf.workers.rank_commands import Rank  # after the lifeline has begun: it imports torch

    watchdog = Watchdog(float(os.environ[DEADLINE_VARIABLE]))

    def report(fraction: float) -> None:
        watchdog.begin()  # pytest's deadline begins again, too
        channel.send(connection, {"progress": fraction})

    commands = Rank(rank, report=seldom(report), folder=Path(folder))
    try:
        _serve(connection, commands, watchdog)
        if OWN_FOLDER_VARIABLE in os.environ:
            remove_folder(Path(folder))
    except (EOFError, OSError):  # of the connection: `_serve` answers the errors of commands
        lifeline.join()  # the controller has ended: the other thread cleans up and ends this process


class Watchdog:
    """Prints the stacks of all threads and the pending collective, if a command takes too long.

    A command begins at `begin` and is done at `end`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(0, print_collective)

    def begin(self) -> None:
        self.end()
        # It prints even while C code holds the interpreter's lock.
        faulthandler.dump_traceback_later(self._seconds, file=sys.stderr)
        self._timer = threading.Timer(self._seconds + COLLECTIVE_SECONDS, print_collective)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._timer.cancel()


def print_collective() -> None:
    """Print the collective that this rank waits in to stderr, as the last line of a report on a hang."""
    found: channel.Message = {}
    with contextlib.suppress(Exception):  # torch's record may have another form
        found = pending_collective()
    os.write(2, f"\n{COLLECTIVE}{json.dumps(found)}\n".encode())


def pending_collective() -> channel.Message:
    """Return the collective that this rank waits in, or {}, from torch's flight recorder.

    torch records the collectives of gloo and NCCL by default.
    """
    torch, entries = sys.modules["torch._C._distributed_c10d"], []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # of gloo; of NCCL
        if (dump := getattr(torch, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for entry in entries:
        is_over = entry["retired"] or entry["state"] == "completed"
        if entry["pg_id"] == entries[-1]["pg_id"] and not is_over:
            name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
            return {"name": name, "number": entry["collective_seq_id"], "sizes": entry["input_sizes"]}
    return {}


def _serve(connection: Connection, commands: object, watchdog: Watchdog) -> None:
    while True:
        message = channel.receive(connection)
        command = message.pop("command")
        watchdog.begin()
        try:
            answer = getattr(commands, command)(**message)
        except Exception as error:
            answer = {"error": describe(error)}
        watchdog.end()
        channel.send(connection, answer)
        sys.stdout.flush()
        if command == "exit":
            return


def seldom(report: Callable[[float], None]) -> Callable[[float], None]:
    """Return a function that passes a fraction on to `report` if a second has passed since the last."""
    last = time.monotonic()

    def report_seldom(fraction: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > REPORT_SECONDS:
            report(fraction)
            last = now

    return report_seldom


def describe(error: Exception) -> channel.Message:
    """Convert an exception to a JSON message with its first line, its traceback and its kind."""
    import torch.distributed as dist

    text = str(error)
    reason = text.rpartition("Last error:")[2].strip()  # NCCL's own comes last
    summary = f"{type(error).__name__}: {(reason.splitlines() or [''])[0]}"
    cause = error.__cause__ if isinstance(error, CannotTrain) else error  # what stopped a graph capture
    return {
        "summary": summary[:MOST_LETTERS].rstrip(": "),
        "traceback": "" if isinstance(error, EXPLAINED) else traceback.format_exc()[-MOST_LETTERS:],
        "distributed": isinstance(error, dist.DistError) or "gloo" in text.lower() or "nccl" in text.lower(),
        "limit": isinstance(cause, LIMITS) and not isinstance(cause, NotImplementedError | RecursionError),
    }


def _die_with_controller(channel_fd: int, folder: Path) -> None:
    """Wait until the controller ends, then become a process that cleans up after it (clean_up.py)."""
    hangup = select.poll()
    hangup.register(channel_fd, select.POLLRDHUP)
    hangup.poll()
    program = str(Path(__file__).with_name("clean_up.py"))
    try:
        os.execv(sys.executable, [sys.executable, "-I", "-S", program, str(folder)])
    except OSError:  # such as too little memory
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
