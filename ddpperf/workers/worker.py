"""The main program of a rank: it connects to the controller and carries out its commands.

bootstrap.py starts it. The first line of standard input is the channel's key. Standard input then
stays open as a lifeline: it closes when the controller ends, whatever the main thread waits for.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ddpperf.errors import CannotTrain
from ddpperf.workers import channel

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

STACKS_SIGNAL = signal.SIGUSR1
EXPLAINED = (CannotTrain, FloatingPointError)  # errors whose message needs no traceback
LIMITS = (RuntimeError, MemoryError, OverflowError)  # raised for too little memory or too small indices


def main(path: str, rank: int) -> None:
    """Serve the controller that listens at `path` until it says "exit" or ends."""
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    key = bytes.fromhex(sys.stdin.readline())
    if not key:  # the controller has ended
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        return
    lifeline = threading.Thread(target=_die_with_controller, args=(Path(path).parent,), daemon=True)
    lifeline.start()
    connection = channel.connect(path, key)
    channel.send(connection, {"rank": rank})
    try:
        _serve(connection, rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        lifeline.join()  # the controller has ended: the other thread cleans up and ends this process


def _serve(connection: Connection, rank: int) -> None:
    # Imported here because it imports torch, while the controller waits for the first message.
    from ddpperf.workers.rank import Rank

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
    """Return an exception as a message: its first line, its traceback and its kind."""
    import torch.distributed as dist

    text = str(error)
    cause = error.__cause__ if isinstance(error, CannotTrain) else error  # what stopped a graph capture
    return {
        "summary": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        "traceback": "" if isinstance(error, EXPLAINED) else traceback.format_exc(),
        "distributed": isinstance(error, dist.DistError) or "gloo" in text.lower() or "nccl" in text.lower(),
        "limit": isinstance(cause, LIMITS) and not isinstance(cause, NotImplementedError | RecursionError),
    }


def _die_with_controller(folder: Path) -> None:
    """Wait until the controller ends; then remove its folder and kill this process group."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
