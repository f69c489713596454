"""Two real ranks that exchange data once, as in each measurement.

As a program, this module starts the ranks and prints a line of JSON:

    python -m ddpperf.doctor.smoke cpu
"""

from __future__ import annotations

import json
import sys

from ddpperf.doctor.child import Report, run_program
from ddpperf.doctor.findings import Finding, Subject, bad, good, late
from ddpperf.errors import first_line
from ddpperf.results import units
from ddpperf.specs import AllReduceSpec, to_json
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet, SetOptions

SPEC = AllReduceSpec(world_size=2, nbytes=2**20)
CALLS = 5  # few, because two ranks that share one core take turns slowly


def smoke_finding(device: str, seconds: float) -> Finding:
    """Return whether two ranks can start, find each other and exchange data in a limited time."""
    return judged(run_program(__name__, device, seconds=seconds), device)


def judged(report: Report, device: str) -> Finding:
    """Return what the report of the two ranks means."""
    where = "GPUs, NCCL" if device == "cuda" else "CPU, gloo"
    if "step_seconds" in report.facts:
        took = units.seconds(report.facts["step_seconds"])
        return good(Subject.SMOKE, f"all_reduce of 1 MiB in {took} ({where})")
    if failure := report.facts.get("failure"):
        advice = "repair what is bad above, or try again"
        return bad(Subject.SMOKE, f"{where}: {failure}", advice)
    text = f"their all_reduce {report.problem} ({where})"
    if report.late:
        return late(Subject.SMOKE, text)
    return bad(Subject.SMOKE, text, "start the command again to see whether it repeats")


def main(device: str) -> None:
    """Measure an all_reduce on two ranks, and print its seconds or what failed."""
    options = SetOptions(size=SPEC.world_size, device=device, rounds=1, deadline_seconds=60)
    ranks = ProcessSet("A1", Side(), options)
    try:
        ranks.spawn()
        ranks.wait_ready()
        ranks.join(SPEC.world_size)
        ranks.answers()
        ranks.request("open", spec=to_json(SPEC))
        answers = ranks.request("sample", iterations=CALLS)
        ranks.request("close")
        ranks.close()
    except Exception as error:  # of a rank, or of the machine: both are the finding
        print(json.dumps({"failure": first_line(error)}))
    else:
        seconds = max(answer["seconds"] for answer in answers.values()) / CALLS
        print(json.dumps({"step_seconds": seconds}))
    finally:
        ranks.kill()


if __name__ == "__main__":
    main(sys.argv[1])
