"""The versions of Python, torch and its libraries, and the compiler.

As a program, this module imports torch and torchvision, tries the GPUs, and prints what it found as
JSON, one line after each step. So an import that crashes or hangs is a finding, too:

    python -m ddpperf.doctor.software cpu
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpperf.doctor.child import Report, run_program
from ddpperf.doctor.findings import Finding, Subject, bad, good, late, warn
from ddpperf.doctor.gpus import loaded_clocks
from ddpperf.errors import first_line
from ddpperf.machine.compiler import compiler_problem
from ddpperf.machine.gpu_watch import SM_CLOCK
from ddpperf.machine.hardware import Gpu, gpu_handles, query_nvml, visible_gpus
from ddpperf.workers.interpreter import MIN_TORCH, release

LOAD_SECONDS = 0.5  # clocks reach their height within 0.1 s
# Libraries that torch brings or needs, whose place LD_LIBRARY_PATH can change
LIBRARY = re.compile(r"lib(nccl|cudart|cudnn\w*|cublas\w*|cupti|nvrtc|torch\w*|c10\w*|gomp|stdc\+\+)[.-]")
# Folders that may be missing: images of containers name the first for drivers that the host may lack
USUAL_FOLDERS = ("/usr/local/nvidia/",)
SYSTEM_FOLDERS = ("/lib", "/usr/lib")  # LD_LIBRARY_PATH changes nothing if it names them
TORCHVISION_OFFSET = 15  # torch 2.N and torchvision 0.(N + 15) are released together


def software_findings(gpus: Sequence[Gpu], seconds: float) -> list[Finding]:
    """Import torch and torchvision in a child process, and return whether they work together."""
    report = run_program(__name__, "cuda" if gpus else "cpu", seconds=seconds)
    return judged(report, gpus, os.environ.get("LD_LIBRARY_PATH", ""))


def judged(report: Report, gpus: Sequence[Gpu], library_path: str) -> list[Finding]:
    """Return what the child process's report means. library_path: $LD_LIBRARY_PATH."""
    facts = report.facts
    torch = _torch(report, gpus, library_path)
    found = [good(Subject.PYTHON, platform.python_version()), torch, _libraries(facts, library_path)]
    if "torch" in facts:
        found.append(_torchvision(report))
        nccl = facts["nccl"]
        if not nccl and gpus:
            found.append(bad(Subject.NCCL, "this torch has none", "install a torch with NCCL"))
        else:
            found.append(good(Subject.NCCL, nccl or "none in this torch"))
    return found + loaded_clocks({index: (now, most) for index, now, most in facts.get("clocks", ())})


def _torch(report: Report, gpus: Sequence[Gpu], library_path: str) -> Finding:
    facts, problem = report.facts, report.problem
    if "torch" not in facts and report.late:
        return late(Subject.TORCH, f"its import {problem}")
    if "torch" not in facts:
        why = facts.get("torch_error") or f"its import {problem}"
        unset = "unset LD_LIBRARY_PATH, " if library_path else ""
        advice = f"{unset}repair what is not good above, or reinstall torch"
        return bad(Subject.TORCH, f"cannot be imported ({why})", advice)
    version, cuda = facts["torch"], facts["cuda"]
    if release(version) < release(MIN_TORCH):
        advice = "pip install --upgrade torch torchvision"
        return bad(Subject.TORCH, f"{version}, ddpperf needs {MIN_TORCH} or newer", advice)
    if gpus and cuda is None:
        advice = "install a torch that is built for CUDA"
        return bad(Subject.TORCH, f"{version} cannot use GPUs, and there are {len(gpus)}", advice)
    if gpus and "clocks" not in facts:
        if report.late:
            return late(Subject.TORCH, f"its use of the GPUs {problem}")
        why = facts.get("cuda_error") or problem
        advice = f"update the driver, or install a torch for an older CUDA than {cuda}"
        return bad(Subject.TORCH, f"{version} for CUDA {cuda} cannot use the GPUs ({why})", advice)
    return good(Subject.TORCH, f"{version}, {f'for CUDA {cuda}' if cuda else 'for the CPU'}")


def _torchvision(report: Report) -> Finding:
    facts = report.facts
    fitting = matching_torchvision(facts["torch"])
    advice = f"pip install torchvision=={fitting}.*" if fitting else "install the torchvision of this torch"
    without = "so its models and loaders cannot run"
    version = facts.get("torchvision")
    if version is None and report.late:
        return late(Subject.TORCHVISION, f"its import {report.problem}")
    if version is None:
        why = facts.get("torchvision_error") or f"its import {report.problem}"
        return warn(Subject.TORCHVISION, f"does not work with this torch ({why}), {without}", advice)
    if not version:
        return warn(Subject.TORCHVISION, f"not installed, {without}", advice)
    if fitting and release(version) != release(fitting):
        text = f"{version} belongs to another torch, torch {facts['torch']} to torchvision {fitting}"
        return warn(Subject.TORCHVISION, text, advice)
    return good(Subject.TORCHVISION, f"{version}, which fits this torch")


def matching_torchvision(torch: str) -> str:
    """Return the version of torchvision that belongs to a version of torch, or an empty string."""
    major, minor = release(torch)
    return f"0.{minor + TORCHVISION_OFFSET}" if major == 2 else ""


def _libraries(facts: dict[str, Any], library_path: str) -> Finding:
    folders = [folder for folder in library_path.split(os.pathsep) if folder]
    error = facts.get("torch_error", "")
    if guilty := next((folder for folder in folders if folder in error), None):
        advice = f"remove {guilty} from LD_LIBRARY_PATH"
        return bad(Subject.LIBRARIES, f"torch fails with a library of {guilty}", advice)
    if foreign := facts.get("foreign"):
        names = ", ".join(sorted(Path(path).name for path in foreign))
        folder = Path(foreign[0]).parent
        text = f"torch loads {names} from {folder} by LD_LIBRARY_PATH"
        return warn(Subject.LIBRARIES, text, "remove it there")
    missing = [
        folder
        for folder in folders
        if not Path(folder).is_dir() and not f"{folder}/".startswith(USUAL_FOLDERS)
    ]
    if missing:
        text = f"LD_LIBRARY_PATH names {missing[0]}, which is not a folder"
        return warn(Subject.LIBRARIES, text, "correct or remove it")
    own = "LD_LIBRARY_PATH replaces none of torch's" if folders else "LD_LIBRARY_PATH is not set"
    return good(Subject.LIBRARIES, own)


def compiler_finding(device: str, seconds: float) -> Finding:
    """Return whether torch.compile finds the compilers that it needs."""
    began = time.monotonic()
    problem = compiler_problem(device, seconds)
    if problem and time.monotonic() - began >= seconds:
        return late(Subject.COMPILER, f"it did not compile a short file within {seconds:.2g} s")
    if problem:
        return warn(Subject.COMPILER, problem, "install both")
    return good(Subject.COMPILER, os.environ.get("CXX", "g++"))


# --- the program in the child process


def main(device: str) -> None:
    """Import torch and torchvision, try the GPUs, and print what was found after each step."""
    try:
        import torch

        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    except Exception as error:
        loaded = sys.modules.get("torch")  # such as a file torch.py of this folder
        _say(torch_error=first_line(error) + (f" in {loaded.__file__}" if loaded else ""))
        return
    _say(torch=str(torch.__version__), cuda=torch.version.cuda, nccl=nccl)
    if device == "cuda":
        _say(**_tried_gpus())
    try:
        import torchvision
        from torchvision.ops import nms

        nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
        _say(torchvision=str(torchvision.__version__))
    except ModuleNotFoundError as error:
        missing = error.name == "torchvision"
        _say(**{"torchvision": ""} if missing else {"torchvision_error": first_line(error)})
    except Exception as error:
        _say(torchvision_error=first_line(error))
    own = str(Path(torch.__file__).parents[1])
    _say(foreign=foreign_libraries(os.fsdecode(Path("/proc/self/maps").read_bytes()), own))


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _tried_gpus() -> dict[str, Any]:
    """Compute on all GPUs for a moment, and return their clocks in MHz or the error.

    clocks: the number of each GPU, its clock and its highest clock, for GPUs that report both.
    """
    import torch

    try:
        tensors = [torch.zeros(2**20, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            for tensor in tensors:
                tensor.add_(1)
        handles = gpu_handles(gpu.uuid for gpu in visible_gpus()).items()
        kinds = "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"
        clocks = [(i, *(query_nvml(kind, handle, SM_CLOCK) for kind in kinds)) for i, handle in handles]
        for index in range(len(tensors)):
            torch.cuda.synchronize(index)
    except Exception as error:
        return {"cuda_error": first_line(error)}
    return {"clocks": [clock for clock in clocks if all(clock[1:])]}


def foreign_libraries(maps: str, own: str) -> list[str]:
    """Return the libraries of torch that were loaded from the folders of LD_LIBRARY_PATH.

    maps: the text of /proc/self/maps. own: the folder of installed packages, which has torch's own.
    """
    named = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
    folders = {os.path.realpath(path) for path in named}
    folders = {path for path in folders if not path.startswith((*SYSTEM_FOLDERS, own))}
    loaded = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split()) > 5}
    return sorted(
        path for path in loaded if LIBRARY.match(Path(path).name) and os.path.dirname(path) in folders
    )


if __name__ == "__main__":
    main(sys.argv[1])
