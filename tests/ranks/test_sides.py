"""Sides of an A/B run in other environments: real interpreters are accepted or refused."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.refused_options import check_sides, lacking_side
from ddpperf.workers import interpreter as probing_module
from ddpperf.workers.channel import PROTOCOL
from ddpperf.workers.interpreter import Side, check_side
from tests.command_line import reader
from tests.project import REPOSITORY, Marked

TORCH = "__version__ = {!r}\nclass version: cuda = {!r}\n"  # imported in no time
MAKE = "def make(): pass\n"
FILES = {
    "garbage": "\x7fnothing",
    "endless": "#!/bin/sh\nexec yes\n",
    "good/torch/__init__.py": TORCH.format("2.11.0a0+git1234", "13.0"),
    "good/mine.py": MAKE,
    "good/incomplete.py": "import timm_of_its_own",
    "good/loud.py": (
        "import atexit, os, subprocess, threading, time\nprint('{}', flush=True)\nos.system('echo out')\n"
        "atexit.register(print, 'goodbye')\nthreading.Thread(target=time.sleep, args=(300,)).start()\n"
        f"subprocess.Popen(['sleep', '300'])\n{MAKE}"
    ),
    "python3.10/sitecustomize.py": "import sys\nsys.version_info = (3, 10, 13)\n",
    "old/torch/__init__.py": TORCH.format("2.10.1+cu128", "12.8"),
    "plain/torch/__init__.py": TORCH.format("2.12.0+cpu", None),
    "ending/torch/__init__.py": "import os\nos._exit(0)\n",
    "hanging/torch/__init__.py": "import os, time\nos.fork()\ntime.sleep(300)\n",
    "broken/ddpperf/__init__.py": "import what_it_needs\n",
    "holds-mine/mine.py": MAKE,
    "holds-src/src/mine.py": MAKE,
    "holds-multiprocessing/mine.py": f"import multiprocessing\n{MAKE}",
    "candidate/src/helper.py": "",
    "candidate/added.py": MAKE,
    "candidate/steps.py": f"import helper\n{MAKE}",
    "lacks-helper/steps.py": f"import helper\n{MAKE}",
    "has-helper/steps.py": f"import helper\n{MAKE}",
    "has-helper/src/helper.py": "",
    "holds-ddpperf/ddpperf/__init__.py": "",
    "holds-ddpperf/ddpperf/workers/channel.py": f'PROTOCOL = "{PROTOCOL}"',
    "holds-ddpperf/ddpperf/workers/worker.py": "def main(*_):\n    import mine; print(mine.__file__)\n",
    "holds-ddpperf/mine.py": MAKE,
    "repository/.git/HEAD": "",
    "repository/common/shared.py": "",
    "repository/package/steps.py": "",
    "worktree/.git": "",
    "worktree/package/steps.py": f"import shared\n{MAKE}",
}
Read = Callable[..., Any]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FILES, and an environment without torch, pytest and ddpperf."""
    at = tmp_path_factory.mktemp("sides")
    for name, text in FILES.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    for name in ("garbage", "endless"):
        (at / name).chmod(0o755)
    venv.create(at / "bare", symlinks=True)
    return at


@pytest.fixture
def read(
    pytestconfig: pytest.Config, marked: Marked, at: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Read]:
    """Check the sides of a command line in that folder; nothing may be left of the checks."""
    monkeypatch.chdir(at)

    def read(
        line: str, device: str = "cpu", model: str = "resnet18", functions: Sequence[str] = ()
    ) -> Sides | None:
        arguments = ["--rootdir", str(at), "--device", device, "--model", model, *shlex.split(line)]
        return check_sides(reader(pytestconfig)(*arguments, gpus=2), functions).sides

    yield read
    marked.assert_nothing_left()


def test_virtual_environment_is_probed_through_its_link(read: Read, at: Path) -> None:
    venv.create(at / "other", symlinks=True)
    (packages,) = (at / "other" / "lib").glob("python*/site-packages")
    (packages / "ours.pth").write_text(str(Path(sys.prefix, "lib", packages.parent.name, "site-packages")))
    python = at / "other" / "bin" / "python"
    assert python.is_symlink()
    assert read("--candidate other/bin/python").candidate == Side(name="B", python=str(python))


def test_model_may_print_and_start_threads_and_processes(read: Read) -> None:
    assert read("--candidate bare/bin/python --candidate good", model="loud:make")


def test_root_may_hold_only_a_tested_function(read: Read, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(at / "good"))
    assert read("--candidate holds-mine", functions=["mine:make"])
    assert read("--candidate holds-src", functions=["mine:make"]), "its folder src is on the path, too"
    assert read("--candidate holds-mine", model="mine:make")
    assert read("--candidate holds-ddpperf")
    assert "holds nothing that a rank loads" in refusal(read, "--candidate holds-mine")


def test_clone_of_ddpperf_compares_with_another_tree(
    read: Read, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of every rank lies in the current folder, and is no module of the candidate."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(at / "good"))
    assert read(f"--candidate {at}/holds-multiprocessing", functions=["mine:make"])


def test_root_that_lacks_a_module_is_refused(read: Read, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise base and candidate would both run the module of the current folder."""
    here = at / "candidate"
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(at / "good"), str(here / "src")]))
    lacks = f"--candidate {at}/lacks-helper"
    sentence = refusal(read, lacks, functions=["steps:make"])
    assert sentence == (
        f"{lacks} lacks a module: its ranks would load helper of the current repository; commit it"
        " there, in the root or in src/, but in no submodule"
    )
    assert read(f"--candidate {at}/has-helper", functions=["steps:make"])


def test_module_elsewhere_in_the_repository_is_refused(
    read: Read, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder may be one package of a repository with several."""
    monkeypatch.chdir(at / "repository" / "package")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(at / "good"), str(at / "repository" / "common")]))
    sentence = refusal(read, f"--candidate {at}/worktree/package", functions=["steps:make"])
    assert "lacks a module: its ranks would load shared of the current repository" in sentence


def test_new_function_is_not_imported_by_the_base(
    read: Read, at: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """A pull request with a new test must still be compared by its other tests."""
    monkeypatch.chdir(at / "candidate")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(at / "good"), str(at / "candidate" / "src")]))
    root = f"--base={at}/has-helper"
    assert read(root, functions=["steps:make", "added:make"])
    refused = refusal(read, f"--candidate {at}/holds-ddpperf", model="added:make")
    assert "would load added of the current repository" in refused, "both sides would run the same model"
    options = reader(pytestconfig)("--rootdir", str(at), "--device", "cpu", root)
    assert lacking_side(options, "steps:make") == ""
    assert lacking_side(options, "added:make") == "base"
    assert lacking_side(options, "installed:make") == ""


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_probe_imports_the_same_modules_as_ranks(
    read: Read, at: Path, safe_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the same name in the current folder must not be taken for the root's."""
    monkeypatch.chdir(at / "holds-mine")
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    monkeypatch.setenv("PYTHONPATH", str(at / "good"))
    side = Side(root=at / "holds-ddpperf")
    command = side.command("rank", "nowhere", "0")
    rank = subprocess.run(
        command, env=os.environ | side.variables(), capture_output=True, text=True, check=True
    )
    assert check_side(side, "the root", "cpu", ["mine:make"]).folders == {
        "ddpperf": str(side.root),
        "torch": str(at / "good"),
        "mine": str(Path(rank.stdout.strip()).parent),
    }


# --- refusals

ENDED = "before it had imported torch and the model; name a Python 3.11 or newer"
NOT_PYTHON = {
    "./garbage": "cannot be started (Exec format error); name a Python interpreter",
    "./endless": f"ended with status -{signal.SIGKILL} {ENDED}",
    "/bin/true": f"ended with status 0 {ENDED}",
    ".": "holds nothing that a rank loads, found ddpperf from ",
}
PROBED = {
    (
        "",
        "",
    ): "cannot import torch, as its ranks must (ModuleNotFoundError: No module named 'torch'); ",
    ("python3.10", ""): "is Python 3.10.13, ddpperf needs 3.11 or newer; name a newer interpreter",
    ("old", ""): "has torch 2.10.1+cu128, ddpperf needs 2.11 or newer; install one there",
    ("broken", ""): "cannot import ddpperf, as its ranks must (ModuleNotFoundError: No module named ",
    ("good", "incomplete:make"): "cannot import incomplete, as its ranks must (ModuleNotFoundError: ",
    ("good", "mine:model"): "cannot import mine, as its ranks must (AttributeError: module 'mine' has no ",
    ("ending", ""): f"ended with status 0 {ENDED}",
    ("hanging", ""): "did not import torch and the model within 0.5 s; try these imports in it",
}


def refusal(read: Read, line: str, **others: Any) -> str:
    with pytest.raises((pytest.UsageError, Refused), match=r"^[^\n]+; [^\n]+\Z") as refused:
        read(line, **others)
    return str(refused.value)


@pytest.mark.parametrize("named", NOT_PYTHON)
def test_unusable_interpreter_is_refused_with_one_sentence(
    read: Read, at: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(at / "good"))
    line = f"--candidate {os.path.normpath(at / named)}"
    assert refusal(read, f"--candidate {named}").startswith(f"{line} {NOT_PYTHON[named]}")


@pytest.mark.parametrize(("root", "model"), PROBED)
def test_environment_that_cannot_run_ranks_is_refused(
    read: Read, at: Path, root: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if root == "hanging":
        monkeypatch.setattr(probing_module, "PROBE_SECONDS", 0.5)
    named = f"--candidate {at}/bare/bin/python" + (f" --candidate {at}/{root}" if root else "")
    assert refusal(read, named, model=model or "resnet18").startswith(f"{named} {PROBED[root, model]}")


def test_torch_without_cuda_is_refused_on_gpus_only(read: Read, at: Path) -> None:
    assert read("--candidate plain", device="cpu")
    assert read("--candidate good", device="cuda")
    sentence = f"--candidate {at}/plain has torch 2.12.0+cpu without CUDA; install"
    assert refusal(read, "--candidate plain", device="cuda").startswith(sentence)


def test_older_ddpperf_is_refused_before_a_measurement(tmp_path: Path) -> None:
    """Its ranks would fail in each measurement."""
    workers = tmp_path / "ddpperf" / "workers"
    workers.mkdir(parents=True)
    for file in (tmp_path / "ddpperf" / "__init__.py", workers / "__init__.py", workers / "channel.py"):
        file.write_text("")
    with pytest.raises(Refused, match=r"the root holds an older ddpperf, .*; store a new baseline"):
        check_side(Side(root=tmp_path), "the root", "cpu", [])
