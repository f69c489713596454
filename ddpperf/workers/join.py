"""Join a process set as one rank: the command that a launcher starts for each rank, on any node.

    python join.py HOST:PORT KEYFILE PER_NODE

The process reads its rank from the launcher's variables, connects to pytest twice, proves that it
knows the key of the run, and becomes the rank's interpreter. It imports no torch. Its first
connection is then the rank's channel, its second one takes all that the rank prints.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this process never imports what the rank imports

from ddpperf.errors import Refused
from ddpperf.io.private_folders import PrivateFolder, hold
from ddpperf.machine.cores import Pinning
from ddpperf.machine.hardware import visible_gpus
from ddpperf.machine.network import interface_to
from ddpperf.workers import channel
from ddpperf.workers.handshake import (
    CONNECT_SECONDS,
    HANDSHAKE_SECONDS,
    KEY_VARIABLE,
    read_key,
    shake_hands,
)
from ddpperf.workers.node_facts import machine_id, node_facts
from ddpperf.workers.worker import OWN_FOLDER_VARIABLE

# Rank, number of ranks and rank within the node, as launchers tell them. A launcher within a Slurm job
# inherits Slurm's own variables, so these come last.
PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def main(address: str, key_file: str, per_node: str) -> None:
    """Join the process set at HOST:PORT, and become its rank; exit with a sentence if that fails."""
    try:
        _join(address, read_key(Path(key_file)), int(per_node))
    except AuthenticationError:
        sys.exit(f"pytest at {address} has another key than {key_file}")
    except (OSError, EOFError, Refused) as error:
        sys.exit(f"this rank cannot join pytest at {address}: {error or type(error).__name__}")


def _join(address: str, key: bytes, per_node: int) -> None:
    host, _, port = address.rpartition(":")
    rank, size, local_rank = place(os.environ, per_node)
    where = host.strip("[]"), int(port)
    hello = {"rank": rank, "size": size, "local_rank": local_rank, "host": socket.gethostname()}
    hello |= {"pid": os.getpid(), "machine": machine_id()}
    connections = []
    for _ in range(2):  # one after the other, as pytest knows them by their order
        connected = socket.create_connection(where, timeout=HANDSHAKE_SECONDS)
        connections.append(shake_hands(connected, key, CONNECT_SECONDS, asks_first=False))
        channel.send(connections[-1], hello)
    commands, output = connections
    welcome = channel.receive(commands)
    # Before the rank is pinned to some of the cores. Slow to find, and the same for all ranks of a node.
    facts = node_facts(welcome["device"], welcome["images"]) if local_rank == 0 else {}
    try:
        command, environment = _prepare(welcome, rank, local_rank, where[0], per_node)
    except (OSError, Refused) as error:
        channel.send(commands, {"problem": str(error)})
        return
    told = {"facts": facts, "interface": environment["GLOO_SOCKET_IFNAME"], "temporary": command[-2]}
    channel.send(commands, told)
    for connection, descriptors in ((commands, [0]), (output, [1, 2])):
        channel.limit_pauses(connection, 0)  # a rank may wait for its next command for hours
        for descriptor in descriptors:
            os.dup2(connection.fileno(), descriptor)
    os.execvpe(command[0], command, environment)


def place(variables: Mapping[str, str], per_node: int) -> tuple[int, int, int]:
    """Return the rank, the number of ranks and the rank within its node, as the launcher tells them."""
    for rank, size, local_rank in PLACES:
        if rank in variables and size in variables:
            number = int(variables[rank])
            return number, int(variables[size]), int(variables.get(local_rank, number % per_node))
    names = ", ".join(rank for rank, _, _ in PLACES)
    raise Refused(f"the launcher sets none of {names}, so this process does not know its rank")


def _prepare(
    welcome: channel.Message, rank: int, local_rank: int, controller: str, per_node: int
) -> tuple[list[str], dict[str, str]]:
    """Make the rank's folder, pin the rank to its CPU cores, and return its command and its variables."""
    os.chdir(welcome["folder"])
    if (root := welcome["root"]) is not None and not os.path.isdir(root):
        raise Refused(f"there is no source tree {root}")  # the rank would import the installed code
    if (interface := interface_to(controller)) is None:
        raise Refused(f"no network interface leads to {controller}")
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # the rank ends its process group when its connection ends
    pinning = Pinning()
    pinning.plan(per_node, visible_gpus()[:per_node] if welcome["device"] == "cuda" else [])
    if pinning.ranks is not None:
        os.sched_setaffinity(0, pinning.ranks[local_rank])
    private = PrivateFolder().path
    os.set_inheritable(hold(private), True)  # or another run may remove it before the rank holds it
    (folder := private / welcome["set"]).mkdir()
    variables: dict[str, Any] = {
        **welcome["environment"],
        "GLOO_SOCKET_IFNAME": interface.name,
        "NCCL_SOCKET_IFNAME": interface.name,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "TMPDIR": str(folder),
        OWN_FOLDER_VARIABLE: "1",
    }
    kept = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    return [*welcome["command"], str(private), str(rank)], kept | variables


if __name__ == "__main__":
    main(*sys.argv[1:])
