"""Clean up after a controller that was killed: end a rank's process group, and remove its files.

    python clean_up.py FOLDER

FOLDER is the private folder of the process set. A rank becomes this process when its connection
closes, so that its threads make nothing new meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(folder: str) -> None:
    """Kill the other processes of this process group, and remove their folder and shared memory."""
    sys.path.append(str(Path(__file__).parents[2]))
    from ddpperf.io.private_folders import remove_folder, remove_tensors
    from ddpperf.machine.child_process import members_of, send_signal, wait_for_end

    others = set(members_of({os.getpgid(0)})) - {os.getpid()}
    send_signal(others, signal.SIGKILL)
    wait_for_end(others)
    remove_tensors({os.getpid(), *others})
    remove_folder(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
