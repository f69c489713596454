"""Whether what is to be compiled can be: the C++ compiler of this machine, and the options of torch's."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from difflib import get_close_matches
from pathlib import Path

import pytest

LIST_OPTIONS = "import torch._inductor; print(*torch._inductor.list_options())"
LIST_SECONDS = 60


@functools.cache
def compiler_reason() -> str:
    """Why nothing can be compiled here, tried with a line; empty if it can be: torch.compile writes C++ that Python calls, for
    $CXX, or g++."""
    compiler = os.environ.get("CXX", "g++")
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "tried.cpp", Path(folder) / "tried.so"
        source.write_text("#include <Python.h>\n#include <cmath>\n")
        headers = f"-I{sysconfig.get_path('include')}"
        command = [*shlex.split(compiler), headers, "-shared", "-fPIC", str(source), "-o", str(library)]
        if compiler and subprocess.run(command, capture_output=True, timeout=20).returncode == 0 and library.exists():
            return ""
    found = compiler or "an empty $CXX"
    needs = "torch.compile needs a C++ compiler with Python's headers"
    return f"{needs}, and {found} is none; install both, or leave compiled forms out"


def check_inductor(options: str) -> None:
    """Raise pytest.UsageError unless torch's compiler has all of these options, joined by +; asked in a process of its own."""
    try:
        listed = subprocess.run([sys.executable, "-c", LIST_OPTIONS], capture_output=True, text=True, timeout=LIST_SECONDS)
    except subprocess.TimeoutExpired:
        return  # the ranks will say
    known = listed.stdout.split()
    for name in options.split("+") if known else ():
        if name not in known:
            nearest = " or ".join(get_close_matches(name, known, n=2)) or "a name of torch._inductor.list_options()"
            raise pytest.UsageError(f"--spec inductor={options}: torch's compiler has no option {name}; write {nearest}")
