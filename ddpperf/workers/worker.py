"""The main program of a rank, which carries out the commands of the controller process.

bootstrap.py starts this program. Standard input is the channel to the controller. It closes when
the controller ends, which ends the rank, too, whatever its main thread waits for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.errors import CannotTrain
from ddpperf.temporary import hold
from ddpperf.workers import channel

STACKS_SIGNAL = signal.SIGUSR1
EXPLAINED = (CannotTrain, FloatingPointError)  # errors whose message needs no traceback
LIMITS = (RuntimeError, MemoryError, OverflowError)  # raised for too little memory or too small indices


def main(folder: str, rank: int) -> None:
    """Carry out the controller's commands until the controller sends "exit" or ends."""
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    connection = Connection(os.dup(0))
    lasting = os.dup(0)  # never closed, so that the connection ends when this process has ended
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # nothing else reads from the channel
    lifeline = threading.Thread(target=_die_with_controller, args=(lasting, Path(folder)), daemon=True)
    lifeline.start()
    with contextlib.suppress(OSError):  # the controller has ended, and the folder is gone
        hold(Path(folder))  # until this process ends
    try:
        _serve(connection, rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        lifeline.join()  # the controller has ended: the other thread cleans up and ends this process


def _serve(connection: Connection, rank: int) -> None:
    from ddpperf.workers.rank import Rank  # after the lifeline has begun: it imports torch

    state = Rank(rank, report=lambda fraction: channel.send(connection, {"progress": fraction}))
    while True:
        message = channel.receive(connection)
        command = message.pop("command")
        try:
            answer = state.run(command, message)
        except Exception as error:
            answer = {"error": describe(error)}
        channel.send(connection, answer)
        sys.stdout.flush()
        if command == "exit":
            return


def describe(error: Exception) -> channel.Message:
    """Convert an exception to a JSON message with its first line, its traceback and its kind."""
    import torch.distributed as dist

    text = str(error)
    cause = error.__cause__ if isinstance(error, CannotTrain) else error  # what stopped a graph capture
    return {
        "summary": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        "traceback": "" if isinstance(error, EXPLAINED) else traceback.format_exc(),
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
