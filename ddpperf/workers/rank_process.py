"""One rank's process, seen from the controller: started by exec, its output in a file, its end always certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import ddpperf
from ddpperf.machine.child_process import describe_exit, end_of
from ddpperf.workers.channel import Listener
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.worker import STACKS_SIGNAL

STACKS_SECONDS = 0.5
EXIT_SECONDS = 5
LOG_TAIL_LINES = 20

# Runs the worker from this very package without putting its parent folder on the path of another interpreter, where
# it could hide that interpreter's own torch.
_BOOTSTRAP = """
import importlib.util, sys
package, path, rank = sys.argv[1:]
spec = importlib.util.spec_from_file_location("ddpperf", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["ddpperf"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from ddpperf.workers.worker import main
main(path, int(rank))
"""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TEARDOWN_CUPTI": "1",  # after a profile: what CUPTI leaves on makes a captured step 0.5 % slower
}
# On a CPU: memory in huge pages where the kernel allows it. With small ones processes of the same code differ by 5 %, as their
# pages happen to lie; with these by 2 %, and a step of 8 images is 6 % faster.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def inherited(device: str) -> dict[str, str]:
    """The environment of every rank, unless its side says otherwise."""
    return (_HUGE_PAGES if device == "cpu" else {}) | os.environ | _ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Side:
    """What runs the ranks of a set: an interpreter that has torch, and variables for its environment.

    root: a folder that comes first on its path; where that has a ddpperf of its own, the ranks run that.
    """

    name: str = "A"
    python: str = sys.executable
    root: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def package(self) -> Path:
        """The folder of the ddpperf that the ranks run."""
        own = self.root / "ddpperf" if self.root is not None else None
        return own if own is not None and (own / "__init__.py").is_file() else Path(ddpperf.__file__).parent

    def variables(self) -> dict[str, str]:
        """What the environment of its processes has besides this process' own."""
        if self.root is None:
            return dict(self.environment)
        inherited = self.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        path = [str(self.root), os.getcwd(), *([inherited] if inherited else [])]
        # safe: else `python -c` has the current folder before the root
        return {**self.environment, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


class RankProcess:
    """The process of `rank`, told to connect to `listener`; raises OSError if it cannot be started.

    log: the file for all that it prints. folder: where its temporary files go. connection: None until it is accepted.
    """

    def __init__(
        self, rank: int, *, device: str, side: Side, listener: Listener, log: Path, folder: Path
    ) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self._log = log
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": str(folder)}
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [side.python, "-c", _BOOTSTRAP, str(side.package), str(listener.path), str(rank)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=inherited(device) | side.variables() | variables,
                process_group=0,  # its own: Ctrl-C reaches the controller alone, and killpg reaches its children
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; whoever waits for it finds out
            self._process.stdin.write(listener.key.hex().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def death(self) -> RankFailure:
        """How it ended, and the end of what it printed."""
        what = describe_exit(self._process)
        lines = end_of(self._log).splitlines()[-LOG_TAIL_LINES:]
        detail = "\n".join([f"the end of rank {self.rank}'s output:", *lines] if lines else [])
        return RankFailure(rank=self.rank, cause=Cause.DIED, what=what, detail=detail)

    def signal_for_stacks(self) -> int:
        """Have it write the stacks of its threads to its log; returns where in the log they will begin."""
        begin = self._log.stat().st_size
        if not self.is_dead():
            self._process.send_signal(STACKS_SIGNAL)
        return begin

    def log_from(self, begin: int) -> str:
        return end_of(self._log, begin)

    def wait(self) -> None:
        """Wait for its end, for a while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_SECONDS)

    def signal_end(self) -> None:
        """Kill it and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """After its end: let go of its pipe and its connection."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.connection is not None:
            self.connection.close()


def stacks_of(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """What every thread of every rank is doing, by rank, as the ranks' own signal handlers write it."""
    begins = {rank: rank.signal_for_stacks() for rank in ranks}
    end = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < end and not all(rank.log_from(begin) for rank, begin in begins.items()):
        time.sleep(0.02)
    time.sleep(0.1)  # a stack is written in many small pieces
    return {
        rank.rank: f"stacks of rank {rank.rank}:\n{rank.log_from(begin)}" for rank, begin in begins.items()
    }
