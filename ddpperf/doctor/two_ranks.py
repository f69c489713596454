"""Two real ranks that import torch and exchange data once, as in each measurement.

As a program, this module starts the ranks and prints its findings as JSON, each in a line. So a
torch that crashes or hangs is a finding, too:

    python -m ddpperf.doctor.two_ranks cuda 2
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ddpperf.doctor.findings import LATE, Finding, Subject, bad, good, warn
from ddpperf.errors import Refused, first_line
from ddpperf.machine.child_process import describe_status, package_path, run_child
from ddpperf.machine.gpu_description import Gpu
from ddpperf.results import units
from ddpperf.specs import AllReduceSpec, to_json
from ddpperf.workers.interpreter import Side, check_side
from ddpperf.workers.process_set import ProcessSet, SetOptions

SPEC = AllReduceSpec(world_size=2, nbytes=2**20)
CALLS = 5  # few, because two ranks that share one core take turns slowly
ADVICE = "repair what is not good above, or try again"


def rank_findings(gpus: Sequence[Gpu], seconds: float) -> list[Finding]:
    """Check whether ranks can start, find each other and exchange data in a limited time."""
    device, count = ("cuda", min(len(gpus), 2)) if gpus else ("cpu", 2)
    command = [sys.executable, "-m", __name__, device, str(count)]
    try:
        ended = run_child(command, {"PYTHONPATH": package_path()}, seconds)
    except OSError as error:
        return [bad(Subject.TWO_RANKS, f"could not be started ({error.strerror})", ADVICE)]
    except subprocess.TimeoutExpired:
        return [warn(Subject.TWO_RANKS, f"did not end within {seconds:.0f} s", LATE)]
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"subject"')]  # not a library's
    if ended.returncode or not lines:
        problem = ": ".join([describe_status(ended.returncode), *ended.stderr.splitlines()[-1:]])
        return [bad(Subject.TWO_RANKS, problem, ADVICE)]
    return [Finding.from_json(json.loads(line)) for line in lines]


# --- the program in the child process


def main(device: str, count: int) -> None:
    """Measure an all_reduce on two ranks, and print its seconds or what failed.

    A single GPU has one rank, which only starts.
    """
    options = SetOptions(size=count, device=device, rounds=1, deadline_seconds=60)
    ranks = ProcessSet("A1", Side(), options)
    try:
        ranks.spawn()
        ranks.wait_ready()
        names = {"torch": "", "cuda": "CUDA ", "nccl": "NCCL "}
        versions = [
            f"{text}{ranks.environment[key]}" for key, text in names.items() if ranks.environment[key]
        ]
        _say(good(Subject.TORCH, ", ".join(versions)))
        done = "one rank starts on the GPU"
        if count > 1:
            backend = "GPUs, NCCL" if device == "cuda" else "CPU, gloo"
            done = f"all_reduce of 1 MiB in {units.seconds(_all_reduce_seconds(ranks))} ({backend})"
        ranks.close()
        _say(good(Subject.TWO_RANKS, done))
    except Exception as error:  # of a rank, or of the machine: both are the finding
        failure = first_line(error)
        try:  # a torch that cannot be imported or does not fit explains it better
            check_side(Side(), "this Python", device, ())
        except Refused as refused:
            failure = str(refused)
        _say(bad(Subject.TWO_RANKS, failure, ADVICE))
    finally:
        ranks.kill()


def _all_reduce_seconds(ranks: ProcessSet) -> float:
    ranks.join(SPEC.world_size)
    ranks.answers()
    ranks.request("open", spec=to_json(SPEC))
    answers = ranks.request("sample", iterations=CALLS)
    ranks.request("close")
    slowest: float = max(answer["seconds"] for answer in answers.values())
    return slowest / CALLS


def _say(finding: Finding) -> None:
    print(json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
