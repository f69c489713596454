"""Whether what is to be compiled can be: the compilers of this machine, and the options of torch's."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from difflib import get_close_matches
from pathlib import Path

from ddpperf.errors import Refused

LIST_OPTIONS = "import torch._inductor; print(*torch._inductor.list_options())"
LIST_SECONDS = 60


@functools.cache
def compiler_reason(device: str = "cpu") -> str:
    """Why nothing can be compiled here, tried with a line; empty if it can be: torch.compile writes C++ that Python calls, for
    $CXX, or g++; for GPUs Triton writes C, too, for $CC, which it takes for one word, or gcc, or clang."""
    cxx, cc = os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang")
    if not _compiles(cxx, "tried.cpp"):
        return _reason("C++", cxx or "an empty $CXX")
    if device == "cuda" and not _compiles(cc, "tried.c"):
        return _reason("C", cc or "an empty $CC")
    return ""


def _reason(language: str, found: str) -> str:
    needs = f"torch.compile needs a {language} compiler with Python's headers"
    return f"{needs}, and {found} is none; install both, or leave compiled forms out"


def _compiles(compiler: str, name: str) -> bool:
    with (
        contextlib.suppress(OSError, ValueError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as folder,
    ):
        source, library = Path(folder) / name, Path(folder) / "tried.so"
        source.write_text("#include <Python.h>\n" + "#include <cmath>\n" * name.endswith(".cpp"))
        arguments = [
            f"-I{sysconfig.get_path('include')}",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(library),
        ]
        words = shlex.split(compiler) if name.endswith(".cpp") else [compiler]
        if compiler and subprocess.run([*words, *arguments], capture_output=True, timeout=20).returncode == 0:
            return library.exists()
    return False


def check_inductor(options: str, option: str = "--spec") -> None:
    """Raise Refused unless torch's compiler has all of these options, joined by +; asked in a process of its own."""
    try:
        listed = subprocess.run(
            [sys.executable, "-c", LIST_OPTIONS], capture_output=True, text=True, timeout=LIST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return  # the ranks will say
    known = listed.stdout.split()
    for name in options.split("+") if known else ():
        if name not in known:
            nearest = (
                " or ".join(get_close_matches(name, known, n=2)) or "a name of torch._inductor.list_options()"
            )
            raise Refused(
                f"{option} inductor={options}: torch's compiler has no option {name}; write {nearest}"
            )
