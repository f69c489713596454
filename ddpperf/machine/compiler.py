"""What torch.compile needs and knows: compilers for C and C++, its options, and its cache."""

from __future__ import annotations

import contextlib
import functools
import getpass
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
    cxx, cc = os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc" if shutil.which("gcc") else "clang")
    if not _compiles(cxx, "tried.cpp", seconds):
        return _problem("C++", cxx or "an empty $CXX")
    if device == "cuda" and not _compiles(cc, "tried.c", seconds):
        return _problem("C", cc or "an empty $CC")
    return ""


def _problem(language: str, found: str) -> str:
    needs = f"torch.compile needs a {language} compiler with Python's headers"
    return f"{needs}, and {found} is not a working compiler"


def _compiles(compiler: str, name: str, seconds: float) -> bool:
    if not compiler:
        return False
    with (
        contextlib.suppress(OSError, ValueError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as folder,
    ):
        source, library = Path(folder) / name, Path(folder) / "tried.so"
        is_cxx = name.endswith(".cpp")
        source.write_text("#include <Python.h>\n" + "#include <cmath>\n" * is_cxx, encoding="utf-8")
        words = shlex.split(compiler) if is_cxx else [compiler]
        include = f"-I{sysconfig.get_path('include')}"
        command = [*words, include, "-shared", "-fPIC", str(source), "-o", str(library)]
        return run_child(command, {}, seconds).returncode == 0 and library.exists()
    return False


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


def compiler_cache() -> dict[str, str]:
    """Return the variable that makes ranks use the user's cache of compiled steps.

    torch keeps it in the folder for temporary files, but that of a rank ends with the rank. Returns an
    empty dict if the user has set the variable, or if the folder belongs to another user.
    """
    with contextlib.suppress(OSError, KeyError):  # KeyError: a user without a name
        folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # as torch names it
        mine = not os.path.lexists(folder) or folder.lstat().st_uid == os.getuid()
        return {CACHE_VARIABLE: str(folder)} if mine and CACHE_VARIABLE not in os.environ else {}
    return {}
