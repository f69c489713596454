"""The first file that a rank's Python interpreter runs, which starts the rank.

    python rank_entry.py rank PACKAGE FOLDER RANK
    python rank_entry.py probe PACKAGE FUNCTION...

The second command prints, as a line of JSON, what the interpreter can import. PACKAGE is the folder
of the ddpperf that the rank uses. ddpperf is imported by its path, because its parent folder on
sys.path could hide the interpreter's own torch. This file imports only the standard library. Python
3.7 can run it too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.process import current_process
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_ERROR_LETTERS = 200


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
    if "" not in (own := own_tree()):  # a module that is imported later is not found, either
        sys.path[1:] = [path for path in sys.path[1:] if not is_foreign(os.path.join(path, "any"), *own)]
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


def own_tree() -> tuple[str, str]:
    """Return sys.path[0] and the current folder, or the repositories that hold them if these differ.

    Returns two empty texts if sys.path[0] is no other source tree.
    """
    root, here = sys.path[0], os.getcwd()
    if root in ("", here) or not getattr(sys.flags, "safe_path", False):
        return "", ""
    tops = [
        next((str(folder) for folder in (path, *path.parents) if (folder / ".git").exists()), "")
        for path in (Path(root), Path(here))
    ]
    return (tops[0] or root, tops[1] or here) if tops[0] != tops[1] else (root, here)


def is_foreign(file: str, root: str, here: str) -> bool:
    """Return whether a file lies in the tree `here`, but not in `root`, nor among installed packages."""
    found, *trees = map(os.path.realpath, (file, root, here, os.path.dirname(os.__file__)))
    of_root, of_here, of_python = (found.startswith(tree + os.sep) for tree in trees)
    return of_here and not of_root and not of_python and "-packages" not in file


def foreign() -> list[str]:
    """Return the imported modules of the current repository, if another source tree is sys.path[0]."""
    own = own_tree()
    return sorted(
        name
        for name, module in list(sys.modules.items())
        for file in [str(getattr(module, "__file__", None) or "")]
        if "" not in (file, *own)
        and is_foreign(file, *own)
        and module is not sys.modules["__main__"]  # this file, which multiprocessing lists twice
        and name.partition(".")[0] not in ("ddpperf", "torch", "torchvision")
    )


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
