"""Limits of control groups, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpperf.machine import cgroup
from ddpperf.machine.cgroup import cpu_quota, memory_left


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all cgroups; the cgroups of the process are in tmp_path/cgroup."""
    monkeypatch.setattr(cgroup, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "fs")
    return tmp_path / "fs"


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_smallest_quota_of_nested_groups_holds(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")
    limit(mounts / "outer" / "inner", cpu__max="max 100000")
    assert cpu_quota() is None
    limit(mounts / "outer", cpu__max="50000 100000")
    assert cpu_quota() == 0.5
    limit(mounts / "outer" / "inner", cpu__max="20000 100000")
    assert cpu_quota() == 0.2


@pytest.mark.parametrize("own", ["/", "/docker/abc"])
def test_container_has_its_own_group_as_root(mounts: Path, tmp_path: Path, own: str) -> None:
    """Without a namespace for cgroups, it sees the path on the host."""
    (tmp_path / "cgroup").write_text(f"0::{own}\n")
    limit(mounts, cpu__max="150000 100000")
    assert cpu_quota() == 1.5


def test_version_1_has_a_hierarchy_for_each_controller(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/m\n2:cpu,cpuacct:/c\n0::/\n")
    limit(mounts / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    limit(mounts / "cpu" / "m", cpu__cfs_quota_us="1", cpu__cfs_period_us="100000")  # another group
    assert cpu_quota() is None
    limit(mounts / "cpu" / "c", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cpu_quota() == 0.5
    use = {"memory__usage_in_bytes": "1000", "memory__stat": "inactive_file 100\ntotal_inactive_file 200"}
    limit(mounts / "memory", memory__limit_in_bytes=str(2**63 - 4096), **use)
    assert memory_left() is None
    limit(mounts / "memory" / "m", memory__limit_in_bytes="5000", **use)
    assert memory_left() == 4200


def test_cached_files_count_as_memory_that_is_left(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job\n")
    limit(mounts / "job", memory__max="max", memory__current="1000", memory__stat="inactive_file 100")
    assert memory_left() is None
    limit(mounts / "job", memory__max="5000")
    assert memory_left() == 4100
    limit(mounts / "job", memory__max="800")
    assert memory_left() == 0


def test_unreadable_groups_are_no_limit(mounts: Path, tmp_path: Path) -> None:
    assert cpu_quota() is None
    (tmp_path / "cgroup").write_text("no colons\n")
    assert cpu_quota() is None
    (tmp_path / "cgroup").write_text("0::/\n")
    limit(mounts, cpu__max="many", memory__max="many")
    assert (cpu_quota(), memory_left()) == (None, None)
