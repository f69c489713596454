"""The script that makes the action's environment, with a package of its own and without a network."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package_index import add_wheel
from tests.project import REPOSITORY
from tests.workflow import ACTION

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# Builds a package that consists of a link to its source.
BACKEND = """
import shutil

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "ddpperf-1-py3-none-any.whl"
    shutil.copy(f"ddpperf/{name}", folder)
    return name
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout of the action with a small package in place of ddpperf."""
    root = tmp_path / "source"
    shutil.copytree(REPOSITORY / ACTION, root / ACTION)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "mine.py").touch()
    add_wheel(root, "ddpperf", "1", {"ddpperf.pth": str(root)})
    return root


def run(source: Path, command: str, timeout: float = 120, **variables: str) -> dict[str, str]:
    """Run the script in an empty checkout; return the outputs of the step."""
    folder = source.parent
    (folder / "checkout").mkdir(exist_ok=True)
    output = folder / "output"
    output.write_text("")
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    runner = {
        "GITHUB_OUTPUT": str(output),
        "RUNNER_TOOL_CACHE": str(folder / "tools"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    subprocess.run(
        ["bash", str(source / ACTION / "environment.sh"), command],
        cwd=folder / "checkout",
        env={**clean, **runner, "PYTHON": sys.executable, "INSTALL": "", **variables},
        check=True,
        timeout=timeout,
    )
    return dict(line.split("=", 1) for line in output.read_text().splitlines())


def test_key_follows_what_is_installed(source: Path) -> None:
    first = run(source, "name")
    assert run(source, "name") == first
    assert first["folder"].startswith(str(source.parent / "tools" / "ddpperf"))
    keys = {first["key"], run(source, "name", INSTALL="torchvision")["key"]}
    (source.parent / "checkout" / "requirements.txt").write_text("numpy")
    keys.add(run(source, "name")["key"])
    (source / "pyproject.toml").write_text(f"{PYPROJECT}# another requirement")
    keys.add(run(source, "name")["key"])
    assert len(keys) == 4


@pytest.mark.slow
def test_environment_is_made_once_and_old_ones_go(source: Path) -> None:
    tools = source.parent / "tools" / "ddpperf"
    for age in range(1, 5):
        (tools / f"old{age}").mkdir(parents=True)
        os.utime(tools / f"old{age}", (1000 - age, 1000 - age))
    folder = Path(run(source, "name")["folder"])
    folder.mkdir()
    (folder / "part").touch()  # of a cancelled job
    run(source, "make", FOLDER=str(folder))
    imported = [str(folder / "bin" / "python"), "-c", "import mine; print(mine.__file__)"]
    found = subprocess.run(imported, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert found == str(source / "mine.py")
    assert not (folder / "part").exists()
    assert sorted(path.name for path in tools.glob("[!.]*")) == sorted([folder.name, "old1", "old2"])
    ready = (folder / "ready").stat().st_mtime_ns
    run(source, "make", FOLDER=str(folder))
    assert (folder / "ready").stat().st_mtime_ns == ready


def test_second_job_waits_for_the_first(source: Path) -> None:
    """Two jobs at once would delete each other's parts, and mark a broken environment as ready."""
    folder = Path(run(source, "name")["folder"])
    folder.mkdir(parents=True)
    (folder / "ready").touch()
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(subprocess.TimeoutExpired, match="timed out after"):
            run(source, "make", timeout=1, FOLDER=str(folder))
    run(source, "make", FOLDER=str(folder))
