"""Limits of control groups, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpperf.machine import cgroup
from ddpperf.machine.cgroup import cpu_quota, memory_left

STAT = "anon 5\ninactive_file 100\ntotal_inactive_file 200"


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a process's files, whose cgroups are below tmp_path/fs."""
    folder = tmp_path / "process"
    folder.mkdir()
    monkeypatch.setattr(cgroup, "PROCESS", folder)
    return folder


def mounted(process: Path, *, groups: str, mounts: list[tuple[str, str, str]]) -> Path:
    """Write the process's cgroups, and mounts as root, folder and kind with options."""
    fs = process.parent / "fs"
    (process / "cgroup").write_text(groups)
    lines = [
        f"{n} 1 0:2{n} {root} {fs / folder} rw,relatime - {kind}\n"
        for n, (root, folder, kind) in enumerate(mounts)
    ]
    (process / "mountinfo").write_text("".join(["9 1 0:5 / / rw shared:1 - ext4 /dev/vda rw\n", *lines]))
    return fs


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


VERSION_2 = [("/", "", "cgroup2 cgroup2 rw,nsdelegate")]


def test_smallest_quota_of_nested_groups_holds(process: Path) -> None:
    fs = mounted(process, groups="0::/outer/inner\n", mounts=VERSION_2)
    limit(fs / "outer" / "inner", cpu__max="max 100000")
    assert cpu_quota() is None
    limit(fs / "outer", cpu__max="50000 100000")
    assert cpu_quota() == 0.5
    limit(fs / "outer" / "inner", cpu__max="200000 100000")
    assert cpu_quota() == 0.5
    limit(fs / "outer" / "inner", cpu__max="20000 100000")
    assert cpu_quota() == 0.2


def test_container_sees_its_own_group_as_root(process: Path) -> None:
    fs = mounted(process, groups="0::/\n", mounts=VERSION_2)
    limit(fs, cpu__max="150000 100000")
    assert cpu_quota() == 1.5


def test_mount_below_the_hosts_root_is_followed(process: Path) -> None:
    """A container without a namespace for cgroups has the host's path, and a mount of its own group."""
    mounts = [("/docker/abc", "", "cgroup2 cgroup2 rw")]
    fs = mounted(process, groups="0::/docker/abc/job\n", mounts=mounts)
    limit(fs / "job", cpu__max="300000 100000")
    assert cpu_quota() == 3


def test_version_1_has_a_hierarchy_for_each_controller(process: Path) -> None:
    mounts = [("/", "cpu", "cgroup cgroup rw,cpu,cpuacct"), ("/", "memory", "cgroup cgroup rw,memory")]
    fs = mounted(process, groups="4:memory:/m\n2:cpu,cpuacct:/c\n0::/\n", mounts=mounts)
    limit(fs / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    limit(fs / "cpu" / "m", cpu__cfs_quota_us="1", cpu__cfs_period_us="100000")  # another group
    assert cpu_quota() is None
    limit(fs / "cpu" / "c", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cpu_quota() == 0.5
    unlimited = {
        "memory__limit_in_bytes": str(2**63 - 4096),
        "memory__usage_in_bytes": "9",
        "memory__stat": STAT,
    }
    limit(fs / "memory", **unlimited)
    assert memory_left() is None
    limit(
        fs / "memory" / "m", memory__limit_in_bytes="5000", memory__usage_in_bytes="1000", memory__stat=STAT
    )
    assert memory_left() == 4200


def test_cached_files_count_as_memory_that_is_left(process: Path) -> None:
    fs = mounted(process, groups="0::/job\n", mounts=VERSION_2)
    limit(fs / "job", memory__max="max", memory__current="1000", memory__stat=STAT)
    assert memory_left() is None
    limit(fs / "job", memory__max="5000")
    assert memory_left() == 4100
    limit(fs / "job", memory__max="800")
    assert memory_left() == 0


def test_unreadable_groups_are_no_limit(process: Path) -> None:
    assert cpu_quota() is None
    mounted(process, groups="no colons\n", mounts=VERSION_2)
    assert cpu_quota() is None
    fs = mounted(process, groups="0::/\n", mounts=VERSION_2)
    limit(fs, cpu__max="many", memory__max="many")
    assert (cpu_quota(), memory_left()) == (None, None)
