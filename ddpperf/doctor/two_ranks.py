"""Two real ranks that import torch and exchange data once, as in each measurement."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ddpperf.doctor.findings import Finding, bad, good, warn
from ddpperf.errors import Refused, first_line
from ddpperf.machine.gpu_description import Gpu
from ddpperf.results import units
from ddpperf.specs import AllReduceSpec, to_json
from ddpperf.workers.interpreter import Side, check_side
from ddpperf.workers.process_set import ProcessSet, SetOptions

TWO_RANKS = "two ranks"
SPEC = AllReduceSpec(world_size=2, nbytes=2**20)
CALLS = 5  # few, because two ranks that share one core take turns slowly


def rank_findings(gpus: Sequence[Gpu], seconds: float) -> dict[str, Finding]:
    """Check whether ranks can start, find each other and exchange data in a limited time.

    A single GPU has one rank, which only starts. Returns the findings by subject.
    """
    device, count = ("cuda", min(len(gpus), 2)) if gpus else ("cpu", 2)
    options = SetOptions(size=count, device=device, rounds=1, deadline_seconds=60)
    ranks = ProcessSet("A1", Side(), options)
    late = threading.Event()

    def end() -> None:
        late.set()
        for rank in ranks.ranks:
            rank.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        ranks.spawn()
        ranks.wait_ready()
        names = {"torch": "", "cuda": "CUDA ", "nccl": "NCCL "}
        versions = [
            f"{name}{ranks.environment[key]}" for key, name in names.items() if ranks.environment[key]
        ]
        done = "one rank starts on the GPU"
        if count > 1:
            backend = "GPUs, NCCL" if device == "cuda" else "CPU, gloo"
            done = f"all_reduce of 1 MiB in {units.seconds(_all_reduce_seconds(ranks))} ({backend})"
        ranks.close()
        return {"torch": good(", ".join(versions)), TWO_RANKS: good(done)}
    except Exception as error:  # of a rank, or of the machine: both are the finding
        if late.is_set():
            advice = "stop other programs, or pass --seconds 60"
            return {TWO_RANKS: warn(f"did not end within {seconds:.0f} s", advice)}
        failure = first_line(error)
        try:  # a torch that cannot be imported or does not fit explains it better
            check_side(Side(), "this Python", device, ())
        except Refused as refused:
            failure = str(refused)
        return {TWO_RANKS: bad(failure, "repair the findings above, or try again")}
    finally:
        timer.cancel()
        ranks.kill()


def _all_reduce_seconds(ranks: ProcessSet) -> float:
    ranks.join(SPEC.world_size)
    ranks.answers()
    ranks.request("open", spec=to_json(SPEC))
    answers = ranks.request("sample", iterations=CALLS)
    ranks.request("close")
    slowest: float = max(answer["seconds"] for answer in answers.values())
    return slowest / CALLS
