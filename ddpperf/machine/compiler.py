"""The requirements of torch.compile: compilers for C and C++, known options, and a cache."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from difflib import get_close_matches
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.machine.child_process import run_child

LIST_OPTIONS = "import torch._inductor; print(*torch._inductor.list_options())"
COMPILE_SECONDS, LIST_SECONDS = 20, 60
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_reason(device: str = "cpu") -> str:
    """Return why torch.compile cannot work here and what to do, or an empty string if it can work."""
    problem = compiler_problem(device)
    return f"{problem}; install both, or leave compiled executions out" if problem else ""


@functools.cache
def compiler_problem(device: str, seconds: float = COMPILE_SECONDS) -> str:
    """Return why torch.compile cannot work on this machine, or an empty string if it can.

    The function compiles a short file to find out. torch.compile writes C++ for $CXX or g++. For
    GPUs Triton also writes C for $CC (one word), gcc or clang. seconds: the limit for each compiler.
    """
    cxx = _problem("torch.compile", "C++", os.environ.get("CXX", "g++"), seconds)
    return cxx or (_c_problem("torch.compile", seconds) if device == "cuda" else "")


@functools.cache
def triton_reason() -> str:
    """Return why Triton cannot compile a kernel here and what to do, or an empty string if it can."""
    problem = _c_problem("low_latency", COMPILE_SECONDS)
    return f"{problem}; install both, or set CC" if problem else ""


def _c_problem(user: str, seconds: float) -> str:
    return _problem(user, "C", os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang"), seconds)


def _problem(user: str, language: str, compiler: str, seconds: float) -> str:
    """Compile a short file, and return why that failed, or an empty string."""
    is_cxx = language == "C++"
    with (
        contextlib.suppress(OSError, ValueError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as folder,
    ):
        source, library = Path(folder) / ("tried.cpp" if is_cxx else "tried.c"), Path(folder) / "tried.so"
        source.write_text("#include <Python.h>\n" + "#include <cmath>\n" * is_cxx, encoding="utf-8")
        words = shlex.split(compiler) if is_cxx else [compiler]
        include = f"-I{sysconfig.get_path('include')}"
        command = [*words, include, "-shared", "-fPIC", str(source), "-o", str(library)]
        if run_child(command, {}, seconds).returncode == 0 and library.exists():
            return ""
    found = compiler or ("an empty $CXX" if is_cxx else "an empty $CC")
    return f"{user} needs a {language} compiler with Python's headers, and {found} is not a working compiler"


def check_inductor(options: str, option: str) -> None:
    """Raise Refused if torch's compiler does not know one of the given options.

    options: the names of the options, joined by +. option: the option of ddpperf that named them. A
    child process asks torch for the known options.
    """
    try:
        known = run_child([sys.executable, "-c", LIST_OPTIONS], {}, LIST_SECONDS).stdout.split()
    except subprocess.TimeoutExpired:
        return  # the ranks will find out
    for name in options.split("+") if known else ():
        if name not in known:
            close = " or ".join(get_close_matches(name, known, n=2))
            problem = f"{option} inductor={options}: torch's compiler has no option {name}"
            raise Refused(f"{problem}; write {close or 'a name of torch._inductor.list_options()'}")


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
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return {CACHE_VARIABLE: str(folder)}
    return {}
