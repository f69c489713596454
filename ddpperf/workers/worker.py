"""A rank: a process that connects to its controller, then does what the messages say until there are no more.

Started by exec (`rank_process.py` has the command line), with the channel's key as the first line of standard input, which
then stays open as a lifeline: it ends when the controller does, whatever the main thread is stuck in.
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
EXPLAINED = (CannotTrain, FloatingPointError)  # what these say is all there is to say
LIMITS = (
    RuntimeError,
    MemoryError,
    OverflowError,
)  # raised by libraries for more than memory or their indices hold


def main(path: str, rank: int) -> None:
    """Serve the controller that listens at `path` until it says "exit" or is gone."""
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    key = bytes.fromhex(sys.stdin.readline())
    if not key:  # the controller is gone already
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        return
    lifeline = threading.Thread(target=_die_with_controller, args=(Path(path).parent,), daemon=True)
    lifeline.start()
    connection = channel.connect(path, key)
    channel.send(connection, {"rank": rank})
    try:
        _serve(connection, rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        lifeline.join()  # the controller is gone: let the other thread clean up, and end this process


def _serve(connection: Connection, rank: int) -> None:
    from ddpperf.workers.rank import (
        Rank,
    )  # only now: it imports torch, and the controller waits for the hello

    state = Rank(rank, report=lambda fraction: channel.send(connection, {"progress": fraction}))
    while True:
        message = channel.receive(connection)
        command = message.pop("command")
        try:
            answer = state.commands[command](**message)
        except Exception as error:
            answer = {"error": describe(error)}
        channel.send(connection, answer)
        sys.stdout.flush()
        if command == "exit":
            return


def describe(error: Exception) -> channel.Message:
    import torch.distributed as dist

    text = str(error)
    cause = (
        error.__cause__ if isinstance(error, CannotTrain) else error
    )  # a capture tells what it was stopped by
    distributed = isinstance(error, dist.DistError) or "gloo" in text.lower() or "nccl" in text.lower()
    return {
        "summary": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        "traceback": "" if isinstance(error, EXPLAINED) else traceback.format_exc(),
        "distributed": distributed,
        "limit": isinstance(cause, LIMITS) and not isinstance(cause, NotImplementedError | RecursionError),
    }


def _die_with_controller(folder: Path) -> None:
    """Wait for the controller's end; then remove its private folder, which it no longer can, and this process group."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
