"""Join a process set as one rank: the command that a launcher starts for each rank, on any node.

    python launched_rank.py HOST:PORT KEYFILE PER_NODE DEVICE [IMAGES]

The process reads its rank from the launcher's variables, connects to pytest twice, proves that it
knows the key of the run, and becomes the rank's interpreter. It imports no torch. Its first
connection is then the rank's channel, its second one takes all that the rank prints.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this process never imports what the rank imports

from ddpperf.errors import Refused
from ddpperf.io.private_folders import PrivateFolder, hold
from ddpperf.machine.cores import Pinning
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.network import interface_to
from ddpperf.workers import channel
from ddpperf.workers.channel import HANDSHAKE_SECONDS, shake_hands
from ddpperf.workers.launcher import KEY_VARIABLE, machine_id, node_facts
from ddpperf.workers.worker import OWN_FOLDER_VARIABLE

CONNECT_SECONDS = 60.0  # until the controller takes a connection: it takes one rank after the other
# Rank, number of ranks and rank within the node, as launchers tell them. A launcher within a Slurm job
# inherits Slurm's own variables, so these come last.
PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def main(address: str, key_file: str, per_node: str, device: str, images: str = "") -> None:
    """Join the process set at HOST:PORT, and become its rank; exit with a sentence if that fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and so remove the folder below
    try:
        with PrivateFolder() as private:  # kept if this process becomes the rank
            _join(address, key_file, int(per_node), device, images, private)
    except AuthenticationError:
        sys.exit(f"pytest at {address} has another key than {key_file}")
    except (OSError, EOFError, Refused) as error:
        sys.exit(f"this rank cannot join pytest at {address}: {error or type(error).__name__}")


def _join(address: str, key_file: str, per_node: int, device: str, images: str, private: Path) -> None:
    host, _, port = address.rpartition(":")
    try:
        key = os.environ.pop(KEY_VARIABLE, "") or Path(key_file).read_text(encoding="utf-8")
    except OSError as error:
        advice = f"share its folder between the nodes, or set {KEY_VARIABLE} on all of them"
        raise Refused(f"the key file {key_file} cannot be read ({error.strerror}); {advice}") from error
    hello = _prepared(host, per_node, device, images) | {"temporary": str(private)}
    connections = []
    for _ in range(2):  # one after the other, as pytest knows them by their order
        connected = socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS)
        connections.append(shake_hands(connected, key.encode(), CONNECT_SECONDS, asks_first=False))
        channel.send(connections[-1], hello)
    welcome = channel.receive(connections[0])
    os.chdir(welcome["folder"])
    if (root := welcome["root"]) is not None and not os.path.isdir(root):
        raise Refused(f"there is no source tree {root}")  # the rank would import the installed code
    (folder := private / welcome["set"]).mkdir()
    variables = {
        **welcome["environment"],
        "GLOO_SOCKET_IFNAME": hello["interface"],
        "NCCL_SOCKET_IFNAME": hello["interface"],
        "RANK": str(hello["rank"]),
        "LOCAL_RANK": str(hello["local_rank"]),
        "TMPDIR": str(folder),
        OWN_FOLDER_VARIABLE: "1",
    }
    for connection, descriptors in zip(connections, ([0], [1, 2]), strict=True):
        channel.limit_pauses(connection, 0)  # a rank may wait for its next command for hours
        for descriptor in descriptors:
            os.dup2(connection.fileno(), descriptor)
    os.set_inheritable(hold(private), True)  # or another run may remove it before the rank holds it
    command = [*welcome["command"], str(private), str(hello["rank"])]
    os.execvpe(command[0], command, os.environ | variables)


def _prepared(controller: str, per_node: int, device: str, images: str) -> channel.Message:
    """Pin this process to the rank's CPU cores, and return the facts that the controller needs."""
    rank, size, local_rank = place(os.environ, per_node)
    if (interface := interface_to(controller)) is None:
        raise Refused(f"no network interface leads to {controller}")
    # Before the rank is pinned to some of the cores. Slow to find, and the same for all ranks of a node.
    facts = node_facts(device, images) if local_rank == 0 else {}
    pinning = Pinning(per_node, visible_gpus() if device == "cuda" else [])
    if pinning.ranks is not None:
        os.sched_setaffinity(0, pinning.ranks[local_rank])
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # the rank ends its process group when its connection ends
    return {
        "rank": rank,
        "size": size,
        "local_rank": local_rank,
        "host": socket.gethostname(),
        "interface": interface.name,
        "facts": facts,
        "pid": os.getpid(),
        "machine": machine_id(),
    }


def place(variables: Mapping[str, str], per_node: int) -> tuple[int, int, int]:
    """Return the rank, the number of ranks and the local rank, from variables that the launcher sets."""
    for rank, size, local_rank in PLACES:
        if rank in variables and size in variables:
            number = int(variables[rank])
            return number, int(variables[size]), int(variables.get(local_rank, number % per_node))
    names = ", ".join(rank for rank, _, _ in PLACES)
    raise Refused(f"the launcher sets none of {names}, so this process does not know its rank")


if __name__ == "__main__":
    main(*sys.argv[1:])
