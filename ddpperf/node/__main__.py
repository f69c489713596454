"""Join a run on several nodes: python -m ddpperf.node --join HOST:PORT.

`pytest perf/ --nodes N` runs on the first node, and prints this command. Start one agent on each
other node. The agent starts the ranks of its node, and ends when the run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.command import print_lines
from ddpperf.errors import Refused
from ddpperf.foreign_text import printable
from ddpperf.machine.hardware import visible_gpus
from ddpperf.machine.network import Interface, find_interface, interface_to
from ddpperf.node.agent import Agent, ContactLost, handle_ending
from ddpperf.node.defaults import KEY_FILE, PORT
from ddpperf.node.facts import facts
from ddpperf.node.handshake import connect, parse_key, read_key
from ddpperf.workers import channel

REFUSED, LOST = 2, 3
RETRY_SECONDS = 0.25
STANDARD_INPUT = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Join a run, serve it to its end, and return the exit status."""
    given = _parser().parse_args(arguments)
    try:
        _run(given)
    except Refused as refused:
        print(f"ddpperf.node: {printable(str(refused))}", file=sys.stderr)
        return REFUSED
    except ContactLost as lost:
        why = printable(str(lost))
        print(f"ddpperf.node: contact lost: {why}; the ranks of this node have ended", file=sys.stderr)
        return LOST
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddpperf.node", description=__doc__)
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="address of the run, as pytest prints it (MASTER_ADDR:MASTER_PORT)",
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        default=KEY_FILE,
        help=f"key file of the first node or its copy, or - for standard input ({KEY_FILE})",
    )
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface of this node for gloo and NCCL (the one that leads to the first node)",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="name of this node in messages (its host name)"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="seconds to wait for the key file and for pytest (300)"
    )
    return parser


def _run(given: argparse.Namespace) -> None:
    if (local_rank := os.environ.get("LOCAL_RANK", "0")) != "0":
        raise Refused(f"a node has one agent, this is local rank {local_rank}; pass --nproc-per-node 1")
    address = _address(given.join)
    end = time.monotonic() + given.seconds
    key = _key(given.key, end)
    gpus = visible_gpus()
    controller = _join(address, key, end)
    interface = _interface(given.interface, controller)
    hello = {
        "name": given.name,
        "interface": interface.name,
        "facts": {device: facts(device, gpus) for device in ("cpu", "cuda")},
    }
    try:
        channel.send(controller, hello)
        answer = channel.receive(controller)
    except (EOFError, OSError, ValueError) as error:
        raise ContactLost("pytest on the first node has ended") from error
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    if "welcome" not in answer:
        raise ContactLost("pytest on the first node has ended")
    welcome = answer["welcome"]
    where = f"as node {welcome['node']}, with interface {interface.name} ({interface.address})"
    say(f"joined the run at {address[0]}:{address[1]} {where}")
    on_gpus = gpus[: welcome["ranks"]] if welcome["device"] == "cuda" else []
    Agent(controller, address, key, gpus=on_gpus, interface=interface.name, say=say).serve(welcome)
    say("the run has ended")


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the lines has ended
        print_lines([f"ddpperf.node: {line}"])


def _address(given: str | None) -> tuple[str, int]:
    if given is None and "TORCHELASTIC_RUN_ID" in os.environ:
        what = f"torchrun's MASTER_ADDR is {os.environ.get('MASTER_ADDR')}, where its own store is"
        raise Refused(f"{what}; pass --join HOST:PORT, as pytest prints it")
    if given is None and "MASTER_ADDR" not in os.environ:
        raise Refused("no run to join was named; pass --join HOST:PORT, as pytest prints it")
    text = given or ":".join([os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", str(PORT))])
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        where = "--join" if given else "MASTER_ADDR and MASTER_PORT"
        what = f"{where} must be HOST:PORT of the first node, got {text!r}"
        raise Refused(f"{what}; pass --join HOST:PORT, as pytest prints it")
    return host.strip("[]"), int(port)


def _key(file: str, end: float) -> bytes:
    """Return the key. Wait for the file until `end`: pytest may write it later to a shared folder."""
    if file == STANDARD_INPUT:
        return parse_key(sys.stdin.readline(), "--key -")
    if not Path(file).exists():
        advice = "copy it from the first node, or pass --key FILE"
        say(f"waiting for the key file {Path(file).absolute()}; {advice}")
    while not Path(file).exists() and time.monotonic() < end:
        time.sleep(RETRY_SECONDS)
    return read_key(Path(file))


def _join(address: tuple[str, int], key: bytes, end: float) -> Connection:
    """Connect to the controller as soon as it listens, or raise Refused if that is after `end`."""
    where, is_waiting = f"{address[0]}:{address[1]}", False
    while True:
        try:
            return connect(address, key)
        except AuthenticationError as error:
            what = f"pytest at {where} has another key"
            raise Refused(f"{what}; copy the first node's key file here") from error
        except OSError as error:
            why = error.strerror or str(error)
            if time.monotonic() > end:
                advice = "start `pytest perf/ --nodes N` on the first node, or correct --join"
                raise Refused(f"no run answers at {where} ({why}); {advice}") from error
            if not is_waiting:
                say(f"waiting for pytest at {where} ({why})")
                is_waiting = True
        time.sleep(RETRY_SECONDS)


def _interface(requested: str | None, controller: Connection) -> Interface:
    """Return the interface of the process groups: the requested one, or that to the controller."""
    if requested is not None:
        return find_interface(requested)
    with socket.socket(fileno=os.dup(controller.fileno())) as connected:
        peer = str(connected.getpeername()[0])
    found = interface_to(peer)
    if found is None:
        raise Refused(f"no network interface leads to {peer}; name one with --interface")
    return found


if __name__ == "__main__":
    handle_ending(lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
