"""A real Slurm cluster on this machine: a controller, and a daemon for each node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.project import wait_until

# Without munge: who can open the ports of this cluster can run jobs, as this user.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=Cores
SelectType=select/cons_tres
SlurmdParameters=config_overrides
KillWait=2
PartitionName=all Nodes={nodes} Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start a cluster with these nodes, and yield the variables that its commands need."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None or os.geteuid() != 0:
        pytest.skip("needs root and Slurm (Debian: apt-get install slurmctld slurmd slurm-client)")
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    lines = [NODE.format(name=name, host=host, port=free_port(), cpus=os.cpu_count()) for name in nodes]
    text = CONFIGURATION.format(host=host, port=free_port(), folder=folder, nodes=",".join(nodes))
    (file := folder / "slurm.conf").write_text("".join(lines) + text)
    variables = {"SLURM_CONF": str(file)}
    commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in nodes)]
    with contextlib.ExitStack() as started, (folder / "log").open("wb") as log:
        for command in commands:
            daemon = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            started.callback(daemon.wait)
            started.callback(daemon.send_signal, signal.SIGTERM)
        idle = ["sinfo", "--noheader", "--Node", "--states=idle"]
        wait_until(
            lambda: len(subprocess.check_output(idle, env=os.environ | variables).splitlines()) == len(nodes),
            30,
            (folder / "log").read_text,
        )
        yield variables
