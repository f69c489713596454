"""Child processes end with their parent and keep to their limits; the kernel frees a dead process's
lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine import child_process
from ddpperf.machine.child_process import kill_group, run_child, trees_of
from ddpperf.machine.device_lock import lock_devices
from tests.project import HANG_SECONDS, Marked, wait_until

HOLDER = """
import subprocess, sys
from ddpperf.machine.device_lock import lock_devices
lock = lock_devices(["cpu"])
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


def test_killed_holder_frees_the_device_though_its_child_lives(
    marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(marked.locks))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=marked.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(Refused, match=f"^cpu is being measured by process {holder.pid}; wait"):
            lock_devices(["cpu"])
        holder.kill()
        holder.wait()
        wait_until(lambda: child in marked.processes(), 5, lambda: "the child ended with its parent")
        lock_devices(["cpu"])
        os.kill(child, 9)


def test_child_that_is_no_python_dies_with_its_parent(marked: Marked) -> None:
    code = "from ddpperf.machine.child_process import run_child\nrun_child(['sleep', '300'], {}, 300)"
    with subprocess.Popen([sys.executable, "-c", code], env=marked.environment) as parent:
        wait_until(
            lambda: any(command.startswith("sleep") for command in marked.processes().values()),
            HANG_SECONDS,
            lambda: "the child was not started",
        )
        parent.kill()
    wait_until(lambda: not marked.processes(), 2, lambda: f"left running: {marked.processes()}")


def test_lines_are_passed_on_while_the_child_runs(tmp_path: Path) -> None:
    """The child waits until its first line has been passed on."""
    seen = tmp_path / "seen"
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        seen.touch()

    script = f"echo $A; while ! [ -e {seen} ]; do sleep 0.02; done; echo second; echo problem >&2; exit 3"
    finished = run_child(["sh", "-c", script], {"A": "1"}, 60, on_line)
    assert lines == ["1", "second"]
    assert (finished.returncode, finished.stdout, finished.stderr) == (3, "1\nsecond\n", "problem\n")


def test_time_limit_kills_all_that_the_child_started(marked: Marked) -> None:
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.2 seconds"):
        run_child(["sh", "-c", "sleep 300 & sleep 300"], {}, 0.2)
    wait_until(lambda: not marked.processes(), 2, lambda: f"left running: {marked.processes()}")


def test_child_that_prints_too_much_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_PRINTED_BYTES", 10_000)
    finished = run_child(["yes"], {}, 60)
    assert finished.returncode == -9
    assert 10_000 < len(finished.stdout) <= child_process.KEPT_BYTES


def test_tree_has_children_of_other_sessions_and_of_ended_parents() -> None:
    script = "setsid sleep 60 & (sleep 60 & echo $!) ; echo $! ; wait"
    with subprocess.Popen(["sh", "-c", script], process_group=0, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        orphan, other = (int(root.stdout.readline()) for _ in range(2))
        try:
            wait_until(lambda: os.getsid(other) == other, HANG_SECONDS, lambda: script)
            assert sorted(trees_of([root.pid])[root.pid]) == sorted([root.pid, orphan, other])
        finally:
            kill_group(root)
            os.kill(other, signal.SIGKILL)


def test_ended_child_is_not_reaped_before_its_group() -> None:
    """The id of a group is free for a stranger once its leader is reaped and its members have ended."""
    child = subprocess.Popen(["sh", "-c", "sleep 60 & exit 3"], process_group=0)
    assert child_process.wait_for_exit(child, 10) == 3
    assert child.returncode is None
    (left,) = child_process.members_of({child.pid})
    child_process.kill_group(child)
    child_process.wait_for_end([left])
    assert child_process.members_of({child.pid}) == []
    assert child.wait() == child_process.wait_for_exit(child) == 3, "before and after it is reaped"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
        (None, "closed its connection, but runs on"),
    ],
)
def test_exit_status_in_words(status: int | None, words: str) -> None:
    assert child_process.describe_status(status) == words
