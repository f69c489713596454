"""Start the agents of the other nodes through ssh."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ddpperf.errors import MAX_LETTERS, Refused
from ddpperf.foreign_text import printable
from ddpperf.machine.child_process import describe_status, die_with_parent, package_path
from ddpperf.node.hostfile import Host

MAX_PRINTED_BYTES = 2**26  # ssh is killed if a node prints more
KEPT_BYTES = 2**12  # of the end of what a node printed
GOODBYE_SECONDS = 2.0
POLL_SECONDS = 0.02
SSH_FAILED = 255  # ssh's own exit status; any other one is that of the remote command
NOT_STARTED = (1, 126, 127)  # of the remote shell, or of a Python without ddpperf
SSH = (
    "ssh",
    "-T",  # no terminal
    "-a",  # the node does not get this user's ssh agent
    "-x",
    *("-S", "none"),  # a shared connection would outlive the run
    *("-o", "BatchMode=yes"),  # never ask for a password
    *("-o", "ConnectTimeout=10"),
)


@dataclass(frozen=True, kw_only=True)
class _Agent:
    host: Host
    process: subprocess.Popen[bytes]
    printed: IO[bytes]  # a file without a name, so that nothing is left of it


class SshAgents:
    """The ssh processes of a run, one for each host of the hostfile.

    An ssh process dies with this process. The agent on the node ends by itself, because its
    connection to the controller closes. Ctrl-C does not reach the ssh processes.
    """

    def __init__(self) -> None:
        self._agents: list[_Agent] = []

    def start(self, hosts: Sequence[Host], *, join: str, key: str) -> None:
        """Start an agent on each host, without waiting for its connection.

        join: the controller's HOST:PORT. key: one line of hex. It goes to the agent's standard input
        only, so that no list of processes shows it. Call this method from the main thread, because
        an ssh process dies with the thread that started it.
        Raises Refused if there is no ssh client.
        """
        for host in hosts:
            printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
            try:
                process = subprocess.Popen(
                    [*SSH, *destination(host), agent_command(host, join)],
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=printed,
                    start_new_session=True,
                    preexec_fn=_limit_child,
                )
            except OSError as error:
                printed.close()
                self.close()
                raise Refused(
                    f"--hostfile needs the ssh client, which cannot be started ({error.strerror}); "
                    "install it (Debian: apt-get install openssh-client), or start the agents yourself"
                ) from error
            self._agents.append(_Agent(host=host, process=process, printed=printed))
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(key.strip().encode() + b"\n")

    def failures(self) -> list[str]:
        """Return a sentence for each host whose ssh process ended with an error."""
        return [_failure(agent) for agent in self._agents if agent.process.poll()]

    def close(self) -> None:
        """End all ssh processes. Those whose agents got the controller's goodbye end by themselves."""
        end = time.monotonic() + GOODBYE_SECONDS
        while time.monotonic() < end and any(agent.process.poll() is None for agent in self._agents):
            time.sleep(POLL_SECONDS)
        for agent in self._agents:
            agent.process.kill()
            agent.process.wait()
            agent.printed.close()
        self._agents.clear()


def destination(host: Host) -> list[str]:
    """Return the arguments of ssh that name a host."""
    port = [] if host.port is None else ["-p", str(host.port)]
    return [*port, host.name if host.user is None else f"{host.user}@{host.name}"]


def agent_command(host: Host, join: str) -> str:
    """Return the line for a host's shell that starts the agent in this folder with this ddpperf."""
    agent = ["-m", "ddpperf.node", "--join", join, "--key", "-", "--name", str(host)]
    command = ["exec", "env", f"PYTHONPATH={package_path()}", sys.executable, *agent]
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}"


def _limit_child() -> None:
    """Let ssh die with this process, and kill it when its output is too long."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_PRINTED_BYTES, MAX_PRINTED_BYTES))


def _failure(agent: _Agent) -> str:
    """Return a sentence that says why an agent did not start, or why it ended."""
    status = agent.process.returncode
    end = os.fstat(agent.printed.fileno()).st_size
    text = os.pread(agent.printed.fileno(), KEPT_BYTES, max(0, end - KEPT_BYTES)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    why = printable((lines or ["no output"])[-1])
    if status == SSH_FAILED:
        what = "ssh exited with status 255"
        check = shlex.join(["ssh", "-o", "BatchMode=yes", *destination(agent.host), "true"])
        advice = f"; make the command `{check}` work"
    elif status in NOT_STARTED:
        what = f"the agent did not start, status {status}"
        advice = (
            f"; the host needs the folder {os.getcwd()} and the interpreter {sys.executable}, with ddpperf"
        )
    else:
        what = f"the agent exited with status {status}" if status > 0 else f"ssh {describe_status(status)}"
        advice = ""
    return f"host {agent.host}: {what} ({why[:MAX_LETTERS].rstrip('.')}){advice}"
