"""Print the rates of copies through a TCP socket on 127.0.0.1, as a JSON list of bytes per second.

Run as a program, with the CPU cores that it may use as a JSON list. The program is not a part of a
rank or of pytest, whose threads would share the processor with the copies.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

NBYTES = 2**25
COPIES = 9  # after one that is not timed
DONE = b"."


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        while True:
            receiver, address = server.accept()
            if address == sender.getsockname():  # not another process of this machine
                return sender, receiver
            receiver.close()


def receive(receiver: socket.socket) -> None:
    """Receive all copies, and confirm each of them with one byte."""
    buffer = memoryview(bytearray(NBYTES))
    for _ in range(1 + COPIES):
        received = 0
        while received < NBYTES:
            if not (count := receiver.recv_into(buffer[received:])):
                return
            received += count
        receiver.sendall(DONE)


def send(sender: socket.socket) -> list[float]:
    """Send all copies, and return the rate of each timed one in bytes per second."""
    buffer, rates = bytearray(os.urandom(2**10) * (NBYTES // 2**10)), []
    for _ in range(1 + COPIES):
        began = time.perf_counter()
        sender.sendall(buffer)
        if sender.recv(1) != DONE:
            raise OSError("the receiver ended early")
        rates.append(NBYTES / (time.perf_counter() - began))
    return rates[1:]


def main(cores: list[int]) -> None:
    """Copy from this process to a child process, and print the rates."""
    os.sched_setaffinity(0, cores)
    sender, receiver = connected()
    if os.fork() == 0:
        sender.close()
        receive(receiver)
        os._exit(0)
    receiver.close()
    print(json.dumps(send(sender)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
