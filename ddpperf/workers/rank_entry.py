"""The first file that a rank's Python interpreter runs, which starts the rank.

    python rank_entry.py rank PACKAGE FOLDER RANK
    python rank_entry.py probe PACKAGE FUNCTION...

The second command prints, as a line of JSON, what the interpreter can import. PACKAGE is the folder
of the ddpperf that the rank uses. ddpperf is imported by its path, because its parent folder on
sys.path could hide the interpreter's own torch. This file imports only the standard library. Python
3.7 can run it too.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.process import current_process
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_ERROR_LETTERS = 200
# Variables with the repository whose code a side's ranks run, and that of the folder they run in
SIDE_CODE, PRESENT_CODE = "DDPPERF_SIDE_CODE", "DDPPERF_PRESENT_CODE"
BUILT_IN_PLACE = ("ddpperf", "torch", "torchvision")  # whose repository may be the present one


def main(command: str, package: str, *arguments: str) -> None:
    """Start a rank or print what it can import, with the current folder first on sys.path."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = ""
    if command == "probe":
        output = os.dup(1)
        os.dup2(2, 1)  # what the imports print goes to stderr
        os.write(output, json.dumps(probe(package, *arguments)).encode() + b"\n")
        os._exit(0)  # skip the threads and exit handlers that the imports left
    import_package(package)
    sys.meta_path.insert(0, Guard)
    builtins.open = io.open = opened
    # Semaphores of loaders get names after the private folder, with which they are removed. Killing a
    # rank's process group would also kill the process of multiprocessing that should remove them.
    current_process()._config["semprefix"] = "/" + Path(arguments[0]).name  # type: ignore[attr-defined]
    from ddpperf.workers import worker

    worker.main(arguments[0], int(arguments[1]))


def probe(package: str, *functions: str) -> dict[str, Any]:
    """Import ddpperf, torch and the functions' modules, and return what `interpreter.Found` holds.

    Each function is the name of a model, or `package.module:function`.
    """
    folders: dict[str, str] = {}
    found: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3])), "folders": folders}
    for name in ["ddpperf:", "torch:", *(name for name in functions if ":" in name)]:
        wanted, _, function = name.partition(":")
        try:
            module = import_package(package) if wanted == "ddpperf" else importlib.import_module(wanted)
            if wanted == "torch":
                found.update(torch=str(module.__version__), cuda=module.version.cuda)
            elif function and wanted != "torchvision":
                getattr(module, function)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or ["no message"]
            why = f"{type(error).__name__}: {lines[0]}"[:MAX_ERROR_LETTERS]
            return {**found, "missing": wanted, "why": why}
        if module.__file__ is not None:
            above = wanted.count(".") + hasattr(module, "__path__")
            folders[wanted] = str(Path(module.__file__).parents[above])
    return {**found, "foreign": foreign(), "torchvision": find_spec("torchvision") is not None}


def foreign() -> list[str]:
    """Return the imported modules of the current repository, if the code of another one is to run."""
    modules = [(name, str(getattr(module, "__file__", None) or "")) for name, module in sys.modules.items()]
    # "__mp_main__" is this file, which multiprocessing lists twice
    return sorted(name for name, file in modules if is_foreign(name, file) and not name.endswith("main__"))


def is_foreign(name: str, file: str) -> bool:
    """Return whether a module comes from the current repository, but neither from the side's nor installed.

    Packages that are installed in the current repository, as in .venv, belong to the interpreter.
    """
    own, present = os.environ.get(SIDE_CODE), os.environ.get(PRESENT_CODE)
    if not own or not present or not file or name.partition(".")[0] in BUILT_IN_PLACE:
        return False
    file = os.path.realpath(file)
    prefixes = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    not_present = [own, *(prefix for prefix in prefixes if prefix.startswith(present + os.sep))]
    return (
        file.startswith(present + os.sep)
        and not any(file.startswith(folder + os.sep) for folder in not_present)
        and "site-packages" not in file
    )


class Guard:
    """Finder of a rank that refuses foreign modules, also those imported while a model is built."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        for finder in sys.meta_path[sys.meta_path.index(Guard) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.has_location and is_foreign(name, str(spec.origin)):
                    from ddpperf.errors import CannotTrain

                    what = f"{name} would come from {spec.origin}, not from {os.environ[SIDE_CODE]}"
                    raise CannotTrain(f"{what}, whose code this rank runs; commit {name}, or install it")
                return spec
        return None


def opened(file: Any, *arguments: Any, _open: Any = open, **options: Any) -> Any:
    """Open a file as `open` does, but refuse a file of the current repository that differs in the side's.

    A model that reads its settings from the current folder would have the same ones on both sides.
    """
    path = "" if isinstance(file, int) else os.fsdecode(os.path.realpath(file))
    if is_foreign("", path) and os.path.isfile(path) and not path.endswith(".py"):  # which Guard refuses
        twin = os.environ[SIDE_CODE] + path[len(os.environ[PRESENT_CODE]) :]
        if os.path.isfile(twin) and _bytes_of(path) != _bytes_of(twin):
            from ddpperf.errors import CannotTrain

            what = f"{file} of the current folder differs from {twin}, whose code this rank runs"
            raise CannotTrain(f"{what}; read it from the folder of __file__")
    return _open(file, *arguments, **options)


def _bytes_of(path: str) -> bytes:
    with io.FileIO(path) as file:
        return file.readall()


def import_package(package: str) -> ModuleType:
    """Import ddpperf from the folder `package`, whatever sys.path holds."""
    spec = spec_from_file_location("ddpperf", f"{package}/__init__.py", submodule_search_locations=[package])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ddpperf"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
