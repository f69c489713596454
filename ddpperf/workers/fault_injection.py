"""Faults that tests inject into a rank: an exception, a hang, a kill or an exit."""

from __future__ import annotations

import os
import signal
import time

from ddpperf.specs import Fault


def inject(fault: Fault | None, rank: int, command: str) -> None:
    """Make this rank fail on purpose, if the fault is for this rank and this command."""
    if fault is None or (fault.rank, fault.command) != (rank, command):
        return
    print(f"injected into rank {rank} at {command}: {fault.kind}", flush=True)
    match fault.kind:
        case "raise":
            raise RuntimeError(f"injected into rank {rank} at {command}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)  # sys.exit would also end the process group, where gloo's threads may abort
        case "hang":
            while True:
                time.sleep(60)
