"""A network switch in a process: it carries Ethernet frames between TAP devices, late and slowly.

`python network_switch.py PREFIX COUNT` makes the devices PREFIX0, PREFIX1, ... of so many nodes. A
frame leaves its node when all earlier frames of that node have left, at the node's rate, and
arrives after the node's delay. Each line of the standard input is a JSON list with a node's number,
its delay in seconds, its bytes per second, and whether its frames are sent and received. Each is
answered by an empty line. The switch ends with its standard input, and the devices end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import sys
from collections import deque
from time import perf_counter

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM = 1  # the kernel leaves checksums out, as between veth devices
PR_SET_TIMERSLACK = 29
HEADER = 10  # bytes of a virtio_net_hdr before each frame
LIMIT = 20_000  # frames of a node that wait; further ones are dropped, as at netem's `limit`
BATCH = 64  # frames that are read before the next look at the clock


def open_tap(name: str) -> int:
    """Make a TAP device and return its file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM)
    return tap


def receivers(frame: bytes, source: int, count: int) -> list[int]:
    """Return the nodes that a frame goes to: the last byte of a MAC address is the node's number."""
    if frame[HEADER] & 1:  # broadcast or multicast
        return [node for node in range(count) if node != source]
    return [node] if (node := frame[HEADER + 5]) < count else []


def main(prefix: str, count: int) -> None:
    """Carry frames until the standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake up on time
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    taps = [open_tap(f"{prefix}{node}") for node in range(count)]
    delay, rate = [0.0] * count, [1e12] * count
    sends, receives = [True] * count, [True] * count
    free = [0.0] * count  # the time when a node's link has sent what it was given
    waiting: list[deque[tuple[float, int, bytes]]] = [deque() for _ in taps]
    print(flush=True)
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=None)
        timeout = None if due is None else max(0.0, due - perf_counter())
        ready, _, _ = select.select([0, *taps], [], [], timeout)
        for source, tap in enumerate(taps):
            if tap not in ready:
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(BATCH):
                    frame = os.read(tap, 2**16)
                    start = max(free[source], perf_counter())
                    if sends[source] and len(waiting[source]) < LIMIT:
                        free[source] = start + (len(frame) - HEADER) / rate[source]
                        for target in receivers(frame, source, count):
                            waiting[source].append((free[source] + delay[source], target, frame))
        now = perf_counter()
        for queue in waiting:
            while queue and queue[0][0] <= now:
                _, target, frame = queue.popleft()
                if receives[target]:
                    with contextlib.suppress(OSError):  # the device is down
                        os.write(taps[target], frame)
        if 0 in ready:
            line = sys.stdin.buffer.readline()
            if not line:
                return
            node, delay[node], rate[node], sends[node], receives[node] = json.loads(line)
            print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
