"""The script that makes the action's environment, with a package of its own and without a network."""

from __future__ import annotations

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


def environment(source: Path, timeout: float = 120, **variables: str) -> Path:
    """Run the script in an empty checkout; return the folder of the environment."""
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
    inputs = {"ENVIRONMENT": "", "INSTALL": "", "PYTHON": sys.executable}
    subprocess.run(
        ["bash", str(source / ACTION / "environment.sh")],
        cwd=folder / "checkout",
        env={**clean, **runner, **inputs, **variables},
        check=True,
        timeout=timeout,
    )
    return Path(output.read_text().strip().removeprefix("folder="))


@pytest.mark.slow
def test_environment_is_made_once_and_old_ones_go(source: Path) -> None:
    tools = source.parent / "tools" / "ddpperf"
    for age in range(1, 5):
        (tools / f"old{age}").mkdir(parents=True)
        os.utime(tools / f"old{age}", (1000 - age, 1000 - age))
    folder = environment(source)
    imported = [str(folder / "bin" / "python"), "-c", "import mine; print(mine.__file__)"]
    found = subprocess.run(imported, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert found == str(source / "mine.py")
    assert sorted(path.name for path in tools.glob("[!.]*")) == sorted([folder.name, "old1", "old2"])
    ready = (folder / "ready").stat().st_mtime_ns
    assert environment(source) == folder
    assert (folder / "ready").stat().st_mtime_ns == ready
    (folder / "ready").unlink()
    (folder / "part").touch()  # of a cancelled job
    environment(source)
    assert not (folder / "part").exists()
    (source / "pyproject.toml").write_text(f"{PYPROJECT}# another requirement")
    assert environment(source) != folder
