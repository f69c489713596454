"""Run child processes that have limits on time and output and that die with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import ddpperf
from ddpperf.io.private_folders import PrivateFolder

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
MAX_PRINTED_BYTES = 2**26  # a child that prints more is killed
KEPT_BYTES = 2**20  # the most that is read of what a process printed
POLL_SECONDS = 0.1
END_SECONDS = 1.0
LOOK_SECONDS = 0.005  # how often an awaited process is looked at


def run_child(
    command: Sequence[str],
    variables: Mapping[str, str | None],
    seconds: float,
    on_line: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a child process with limits on its time and its output.

    variables: added to this process's environment; None removes one. on_line: called with each line
    of the child's output while it runs. The child gets its own temporary folder. At the end, the
    folder is removed and all processes that the child started are killed. At most the last MiB of
    each output is returned. Raises OSError if the command cannot be started and
    subprocess.TimeoutExpired after `seconds`, counted from the last line for `on_line`.
    """
    with PrivateFolder() as folder:
        # files instead of pipes: a grandchild would hold a pipe open
        output, errors = folder / "output", folder / "errors"
        environment = os.environ | dict(variables) | {"TMPDIR": str(folder)}
        with (
            output.open("wb") as out,
            errors.open("wb") as err,
            output.open(encoding="utf-8", errors="replace") as reader,
        ):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={name: value for name, value in environment.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches this process alone
                preexec_fn=die_with_parent,
            )
            deadline, unread, running = time.monotonic() + seconds, "", True
            try:
                while running:
                    running = wait_for_exit(process, POLL_SECONDS) is None
                    if on_line is not None:
                        *lines, unread = (unread + reader.read()).split("\n")
                        for line in lines:
                            on_line(line)
                            deadline = time.monotonic() + seconds
                    if output.stat().st_size + errors.stat().st_size > MAX_PRINTED_BYTES:
                        kill_group(process)
                    elif running and time.monotonic() > deadline:
                        raise subprocess.TimeoutExpired(command, seconds)
            finally:
                kill_group(process)
                status = process.wait()
        return subprocess.CompletedProcess(command, status, end_of(output), end_of(errors))


def package_path() -> str:
    """Return the PYTHONPATH of a child process that imports this ddpperf.

    The folders of this process's PYTHONPATH follow. If there are none, nothing follows, because an
    empty entry would stand for the current folder.
    """
    folders = str(Path(ddpperf.__file__).parents[1]), os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, folders))


def die_with_parent() -> None:
    """Ask the kernel to kill the current process when its parent process dies.

    The request stays in effect after an exec.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_exit(process: subprocess.Popen[bytes], seconds: float = 0.0) -> int | None:
    """Wait for a child's exit status without reaping the child, or return None if it runs on.

    The id of a process is not used again before the process is reaped, nor is that of its group.
    Popen's `poll` and `wait` reap it.
    """
    end = time.monotonic() + seconds
    while process.returncode is None:
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this process ignores its children, or something else has reaped it
            return process.poll()
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if (left := end - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, LOOK_SECONDS))  # a pidfd needs a free descriptor and Linux 5.3
    return process.returncode


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a process group, and its group, unless the child has been reaped."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def members_of(groups: Collection[int]) -> list[int]:
    """Return the ids of the live processes in some process groups."""
    live = _live_processes() if groups else {}
    return [process for process, (_, group) in live.items() if group in groups]


def trees_of(roots: Collection[int]) -> dict[int, list[int]]:
    """Return the ids of each root process and its descendants, by root.

    A member of a group that a root leads counts as its child, even after its own parent has ended.
    """
    children: dict[int, list[int]] = {}
    for process, (parent, group) in _live_processes().items():
        leader = group if group in roots and group != process else parent
        children.setdefault(leader, []).append(process)
    trees = {root: [root] for root in roots}
    for tree in trees.values():
        for process in tree:  # the tree grows meanwhile
            tree += children.pop(process, [])
    return trees


def descendants_of(root: int) -> list[int]:
    """Return the ids of the live descendants of a process."""
    return trees_of([root])[root][1:]  # the root comes first


def send_signal(processes: Collection[int], number: int) -> bool:
    """Send a signal to processes, and return whether one of them got it."""
    sent = False
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
            sent = True
    return sent


def wait_for_end(processes: Collection[int]) -> None:
    """Wait at most END_SECONDS until processes that were killed have ended."""
    end = time.monotonic() + END_SECONDS
    while any(_parent_and_group(process) for process in processes) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)


def _live_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the process group of each live process."""
    entries: list[str] = []
    with contextlib.suppress(OSError):  # no descriptor is free: the groups must be killed all the same
        entries = os.listdir("/proc")
    processes = {int(entry): _parent_and_group(int(entry)) for entry in entries if entry.isdecimal()}
    return {process: found for process, found in processes.items() if found is not None}


def _parent_and_group(process: int) -> tuple[int, int] | None:
    """Return the parent and the process group of a process, or None if the process has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent, group = status.rpartition(")")[2].split()[:3]
    return None if state in "ZX" else (int(parent), int(group))


def end_of(log: Path) -> str:
    """Return the text of a log file, but at most its last MiB."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - KEPT_BYTES))
        return file.read().decode(errors="replace")


def describe_status(status: int | None) -> str:
    """Return a phrase that explains a process's exit status, which is negative for a signal.

    None: the process has closed its connection, but it runs.
    """
    if status is None:
        return "closed its connection, but runs on"
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-status, f'signal {-status}')}"
    return f"exited with status {status}"
