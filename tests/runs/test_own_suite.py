"""A repository made from docs/own-suite.md alone, with ddpperf installed from its wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf import __version__
from ddpperf.init.__main__ import FILES, TEMPLATE
from tests.project import REPOSITORY, Project, git

PAGE = REPOSITORY / "docs" / "own-suite.md"
SHOWN = [name for name in FILES if name != "perf/test_script.py"]  # docs/scripts.md runs it
QUICK = ("--rounds", "2", "--batch-sizes", "4", "--world-sizes", "1,2", "--device", "cpu")


def blocks() -> dict[str, list[str]]:
    """Return the code blocks of the page that begin with a file's name, by that name."""
    found: dict[str, list[str]] = {}
    for name, code in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        found.setdefault(name, []).append(code)
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this source tree, and install it alone into a folder of its own."""
    folder, installed = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    source = folder / "source"
    kept = shutil.ignore_patterns("__pycache__", "baselines")
    shutil.copytree(REPOSITORY / "ddpperf", source / "ddpperf", ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    python = [sys.executable, "-m"]
    build = [*python, "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [*python, "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(installed), str(wheel)], check=True, capture_output=True)
    return installed


class Repository(Project):
    """A git repository whose files come from the page, and that uses the installed wheel."""

    def __init__(self, root: Path, installed: Path) -> None:
        super().__init__(root)
        shutil.rmtree(root / "perf")
        (root / "conftest.py").unlink()
        self.environment["PYTHONPATH"] = str(installed)

    def options(self) -> list[str]:
        return ["-p", "no:cacheprovider", *QUICK]

    def do(self, *command: str) -> str:
        ended = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


@pytest.fixture
def repository(tmp_path: Path, installed: Path) -> Iterator[Repository]:
    mine = Repository(tmp_path, installed)
    git(mine.root, "init", "--quiet")
    yield mine
    mine.clean()


def test_page_shows_what_init_writes() -> None:
    found = blocks()
    for name in SHOWN:
        assert found[name][0] == (TEMPLATE / name).read_text(), name
    assert found["conftest.py"][0] == (TEMPLATE / "conftest.py").read_text()


def test_wheel_has_all_that_it_needs(installed: Path) -> None:
    package = installed / "ddpperf"
    for name in ("py.typed", "report/templates/page.html", *(f"init/template/{file}" for file in FILES)):
        assert (package / name).is_file(), name
    (metadata,) = installed.glob("ddpperf-*.dist-info/METADATA")
    text = metadata.read_text()
    assert f"Version: {__version__}\n" in text
    for needed in ("torch>=", "torchvision>=", "pytest-benchmark>=", "scipy>="):
        assert f"Requires-Dist: {needed}" in text
    assert (metadata.parent / "licenses" / "LICENSE").is_file()
    for other in ("perf", "tests", "tools"):
        assert not (installed / other).exists()


@pytest.mark.slow
def test_first_run_of_the_page_passes(repository: Repository) -> None:
    repository.do(sys.executable, "-m", "ddpperf.init")
    git(repository.root, "add", ".")
    git(repository.root, "commit", "--quiet", "-m", "one")
    finished = repository.run("perf", "--benchmark-save=first")
    finished.assert_one_sentence(0, "PASS: 2 tests measured")
    assert "STEP  batch 4 per rank, make_step" in finished.output
    assert list(repository.root.glob("perf/baselines/*/0001_first.json"))
    measured = repository.measured()
    assert measured["test_step[2rank-b4-make_step]"]["metrics"]["efficiency"]["value"] > 0


@pytest.mark.slow
def test_collective_of_the_page_passes(repository: Repository) -> None:
    for name, codes in blocks().items():
        (repository.root / name).parent.mkdir(exist_ok=True)
        (repository.root / name).write_text(codes[-1])  # the conftest.py with a metric
    repository.run("perf/test_collectives.py").assert_one_sentence(0, "PASS: 2 tests measured")
    code = (repository.root / "perf" / "collectives.py").read_text()
    wrong = code.replace("    dist.broadcast(buffer, 0)\n", "")
    assert wrong != code
    (repository.root / "perf" / "collectives.py").write_text(wrong)
    finished = repository.run("perf/test_collectives.py")
    assert finished.status == 1, finished
    assert "ArithmeticError: all_reduce is wrong" in finished.output
