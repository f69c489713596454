"""The requirements of torch.compile: compilers for C and C++, and a cache of compiled steps."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from ddpperf.machine.child_process import run_child

COMPILE_SECONDS = 20
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_reason(device: str = "cpu") -> str:
    """Return why torch.compile cannot work here and what to do, or an empty string if it can work."""
    for language in ("C++", "C") if device == "cuda" else ("C++",):  # torch writes C++, and Triton C
        if problem := compiler_problem(language):
            return f"torch.compile {problem}; install both, or leave compiled executions out"
    folder = os.environ.get(CACHE_VARIABLE) or tempfile.gettempdir()
    with contextlib.suppress(OSError):  # torch will make the folder
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            what = f"cannot load what it compiles in {folder}, which is mounted noexec"
            return f"torch.compile {what}; set TMPDIR to another folder, or leave compiled executions out"
    return ""


@functools.cache
def compiler_problem(language: str) -> str:
    """Return why C or C++ cannot be compiled on this machine, or an empty string if it can.

    The function compiles a short file to find out, as torch does for C++ ($CXX, or g++) and Triton for
    C ($CC, which is one word, or gcc, or clang).
    """
    if language == "C++":
        compiler = os.environ.get("CXX", "g++")
        name, code = "tried.cpp", "#include <Python.h>\n#include <cmath>\n"
    else:
        compiler = os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang")
        name, code = "tried.c", "#include <Python.h>\n"
    with (
        contextlib.suppress(OSError, ValueError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as folder,
    ):
        source, library = Path(folder, name), Path(folder, "tried.so")
        source.write_text(code, encoding="utf-8")
        words = shlex.split(compiler) if language == "C++" else [compiler]
        include = f"-I{sysconfig.get_path('include')}"
        command = [*words, include, "-shared", "-fPIC", str(source), "-o", str(library)]
        if run_child(command, {}, COMPILE_SECONDS).returncode == 0 and library.exists():
            return ""
    found = compiler or "an empty variable"
    return f"needs a {language} compiler with Python's headers, and {found} is not a working compiler"


def compiler_cache(device: str) -> dict[str, str]:
    """Return the variable that makes ranks use the user's cache of compiled steps.

    torch keeps it in the folder for temporary files, but that of a rank ends with the rank. Returns an
    empty dict if the user has set the variable, if other users can write into the cache, and on a CPU,
    where a killed compiler leaves damaged files in the cache.
    """
    if CACHE_VARIABLE in os.environ or device != "cuda":
        return {}
    with contextlib.suppress(OSError, KeyError):  # KeyError: a user without a name
        folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # as torch names it
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # everybody can write to a symbolic link
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return {CACHE_VARIABLE: str(folder)}
    return {}
