"""One run at a time on a device: two would time each other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence

from ddpperf.errors import Refused


class DeviceLock:
    """Holds the named devices from `acquire` to `release`, or to the process' end.

    A lock is a listening socket in Linux' abstract namespace: it has no file, the kernel takes it back however its process
    ends, and who connects learns its process. Runs with different DDPPERF_LOCK_SCOPE do not see each other; the suite's
    own tests use that.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def acquire(self, devices: Sequence[str]) -> None:
        """Take all devices or none; raises Refused that names the run which holds one."""
        try:
            for device in devices:
                self._held.append(_lock(device))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        while self._held:
            self._held.pop().close()


def _lock(device: str) -> socket.socket:
    name = f"\0ddpperf/{os.environ.get('DDPPERF_LOCK_SCOPE', '')}/{device}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise Refused(
                f"the lock {name[1:]!r} cannot be taken: {error.strerror}; choose another scope"
            ) from None
        raise Refused(
            f"{device} is being measured by {_holder(name)}; wait until that run ends, or stop it"
        ) from None
    lock.listen(socket.SOMAXCONN)  # visitors are never accepted, they only look
    return lock


def _holder(name: str) -> str:
    """Who listens at a name, from the credentials that the kernel keeps of it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(1)
        visitor.connect(name)
        credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return f"process {struct.unpack('3i', credentials)[0]}"
    return "another run"
