"""Measures all that a machine with several GPUs can show, part by part.

    NCCL_NVLS_ENABLE=0 python -m tools.several_gpus FOLDER [--seconds 540] [--only core-1] [OPTIONS]

Each part is a test run in a fresh process; the most important part is measured first. For each part,
the folder gets the output (NAME.txt) and the stored run (NAME.json). A part whose stored run is in
the folder is not measured again, so that several calls can share the work. When the seconds are
over, the part that runs is interrupted. What it has measured is kept as NAME-interrupted.json, and
the next call measures the part again. core-compared compares with core-1, which must be in the folder.
`python -m ddpperf.report FOLDER/NAME.json` shows a stored run.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ddpperf.machine.child_process import die_with_parent
from tools.markdown_tables import ROOT

THIS_PYTHON = f"--candidate={sys.executable}"
SCALING = "perf/test_scaling.py"
WEAK = f"{SCALING}::test_weak_scaling"
BUCKETS = "{gpus}gpu and not data_parallel and not torchvision and not resnet50"
# NCCL's all_reduces in CUDA graphs and plain DDP steps, which README.md's picture shows
PICTURE = (
    "(test_weak_scaling or graph) and not eager and not compile and not own_ddp and not resnet50 and not "
    "torchvision and not shot and not copy_engine and not low_latency and not out_of_place"
)
# The arguments of each test run, by its name. The delay is 3% of the shortest step on 2 H200s.
PARTS = {
    "core-1": ["perf/"],
    "core-2": ["perf/"],
    "core-3": ["perf/"],
    "core-compared": ["perf/", "--benchmark-compare={folder}/core-1.json"],
    "gate-equal": ["perf/", "-m", "gate", THIS_PYTHON],
    "gate-slower": ["perf/", "-m", "gate", THIS_PYTHON, "--candidate=delay_seconds=0.00006"],
    "all_reduce": ["perf/test_all_reduce.py", "-k", "{gpus}gpu"],
    "own_ddp": [WEAK, "-k", "{gpus}gpu and own_ddp and not compile and not eager"],
    "epochs": [f"{SCALING}::test_epoch_scaling", "-k", "({gpus}gpu or 1gpu) and compile and not eager"],
    "split": ["perf/test_comm_split.py::test_comm_split", "-k", "{gpus}gpu and not resnet50"],
    "laws": [f"{SCALING}::test_amdahl", f"{SCALING}::test_gustafson", "perf/test_projection.py"],
    "buckets": [WEAK, "--executions=graph", "--spec=bucket_cap_mb=25", "-k", BUCKETS],
    "picture": [WEAK, "perf/test_all_reduce.py::test_all_reduce", "-k", PICTURE],
}
LEAST_SECONDS = 30  # a part does not begin if less is left
SECONDS_TO_SAVE = 20  # for an interrupted part
MOST_SECONDS_TO_SAVE = 50  # until an interrupted part is killed


def measure(folder: Path, wanted: Sequence[str], seconds: float, options: Sequence[str]) -> None:
    """Measure the wanted parts that the folder does not have yet, until the seconds are over."""
    end, gpus = time.monotonic() + seconds, torch.cuda.device_count()
    for name in wanted:
        left = end - time.monotonic()
        if not (folder / f"{name}.json").exists() and left > LEAST_SECONDS:
            arguments = [argument.format(folder=folder, gpus=gpus) for argument in PARTS[name]]
            command = [sys.executable, "-m", "pytest", *arguments, *options]
            run_part(folder, name, command, left - SECONDS_TO_SAVE)


def run_part(folder: Path, name: str, command: Sequence[str], seconds: float) -> None:
    """Run a part, interrupt it when its seconds are over, and keep its output and its stored run."""
    # Not NAME.json: pytest makes the file at its start, and a killed part leaves it empty.
    stored = folder / f"{name}.json.part"
    command = [*command, f"--benchmark-json={stored}"]
    print(f"{name}: {shlex.join(command)}", flush=True)
    began, ending = time.monotonic(), ""
    with open(folder / f"{name}.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ending = "-interrupted"
            process.terminate()  # a process that a shell started in the background ignores SIGINT
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(MOST_SECONDS_TO_SAVE)
            process.kill()
            process.wait()
    if stored.exists() and stored.stat().st_size:
        stored.replace(folder / f"{name}{ending}.json")
    stored.unlink(missing_ok=True)
    print(f"  exit status {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.several_gpus",
        description=f"{__doc__.splitlines()[0]} All test runs get further options of pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="folder of the outputs and the stored runs")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together; default 540")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="the parts; default all")
    given, options = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    measure(given.folder.resolve(), given.only, given.seconds, options)


if __name__ == "__main__":
    main()
