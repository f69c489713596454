"""What an interpreter has that is to run ranks: python probe.py MODEL PACKAGE, by its file, for it may have no ddpperf.

Prints a line of JSON before it imports anything and one at its end. Standard library only; an old Python runs it, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MOST_LETTERS = 200  # of an error within a sentence


def main(model: str, package: str) -> None:
    """Say on standard output what is here; what the imports print goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    found: dict[str, Any] = {"python": ".".join(str(number) for number in sys.version_info[:3])}
    _write(output, found)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = ""  # in place of this script's folder: a rank has the path of python -c
    _write(output, {**found, **load(model, package)})
    os._exit(0)  # whatever threads and handlers the imports left


def load(model: str, package: str) -> dict[str, Any]:
    """The versions of torch and its CUDA, and from which folder on the path ddpperf, torch and the model's module come; or
    the first of them that cannot be imported, and why. package: the folder of the ddpperf that ranks run."""
    name, _, function = model.partition(":")
    folders: dict[str, str] = {}
    found: dict[str, Any] = {"folders": folders}
    for wanted in ("ddpperf", "torch", name) if function else ("ddpperf", "torch"):
        try:
            module = importlib.import_module(wanted) if wanted != "ddpperf" else _import_package(package)
            if wanted == "torch":
                found.update(torch=str(module.__version__), cuda=module.version.cuda)
            elif wanted == name != "torchvision":  # the user's own
                getattr(module, function)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or ["no message"]
            return {**found, "missing": wanted, "why": f"{type(error).__name__}: {lines[0]}"[:MOST_LETTERS]}
        if module.__file__ is not None:
            above = wanted.count(".") + hasattr(module, "__path__")
            folders[wanted] = str(Path(module.__file__).parents[above])
    return {**found, "torchvision": importlib.util.find_spec("torchvision") is not None}


def _import_package(package: str) -> ModuleType:
    """Import ddpperf as a rank does, from this folder whatever the path is."""
    spec = importlib.util.spec_from_file_location(
        "ddpperf", f"{package}/__init__.py", submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ddpperf"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(output: int, found: dict[str, Any]) -> None:
    os.write(output, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
