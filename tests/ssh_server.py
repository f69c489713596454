"""A real ssh server on this machine with keys of its own, and an `ssh` that knows it."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
START_SECONDS = 20.0


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free at the moment."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def ssh_server(
    folder: Path,
    hosts: Sequence[str],
    *,
    options: Sequence[str] = (),
    inside: Sequence[str] = (),
    address: str,
) -> Iterator[int]:
    """Run sshd at an address, and yield its port.

    Writes an executable `ssh` to `folder`/bin that reaches the server by each name in `hosts`. It
    knows the server's key and logs in with a key of its own. The user's files in ~/.ssh are not
    read. inside: what the server's command begins with, such as `ip netns exec NAME`.
    """
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd (Debian: apt-get install openssh-server openssh-client)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # for privilege separation
    for name in ("server_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    (folder / "known_hosts").write_text(f"* {(folder / 'server_key.pub').read_text()}")
    (folder / "config").write_text(
        f"Host {' '.join(hosts)}\n  HostName {address}\n  Port {port}\n  User {getpass.getuser()}\n"
        f"Host *\n  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder / 'known_hosts'}\n"
    )
    (client := folder / "bin" / "ssh").parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{folder / "config"}" "$@"\n')
    client.chmod(0o755)
    settings = {
        "AuthorizedKeysFile": folder / "user_key.pub",
        "HostKey": folder / "server_key",
        "ListenAddress": address,
        "PidFile": "none",
        "Port": port,
        "StrictModes": "no",
        "UsePAM": "no",
    }
    given = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    server = subprocess.Popen(
        [*inside, SSHD, "-D", "-e", "-f", "/dev/null", *given, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "sshd.log").open("wb"),
    )
    try:
        wait_for(client, hosts[0], server, folder / "sshd.log")
        yield port
    finally:
        server.terminate()
        server.wait()


def wait_for(client: Path, host: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while subprocess.run([client, "-o", "BatchMode=yes", host, "true"], capture_output=True).returncode:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
