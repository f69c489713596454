"""Let faults happen at random moments, and show in one table how each fault was handled.

    python -m tests.faults --count 10 --seed 1

The exit status is 1 if a fault was reported late or with another cause, if the next measurement was
wrong, or if anything was left behind. A file keeps the outcomes, so that --resume can continue an
interrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddpperf.io.private_folders import SHARED_MEMORY
from tests.faults.of_ranks import RANK_FAULTS, RankFaults
from tests.faults.of_runs import RUN_FAULTS, RunFaults
from tests.faults.outcomes import Kept, Outcome, table
from tests.namespaces import can_mount, mounted
from tests.project import REPOSITORY

FILE = Path(".ddpperf/faults.jsonl")
OWN_MEMORY = "FAULTS_HAVE_OWN_MEMORY"  # a variable, set if nobody else uses this process's /dev/shm
INTERRUPTED = 130  # exit status
CLEAR = "\x1b[H\x1b[J"  # the terminal

MakeHappen = Callable[[int, random.Random], Outcome]  # a fault's number and its chance


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=10, help="how often each fault happens; default 10")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments; default 1")
    parser.add_argument("--only", default="", help="let only faults happen whose names match this pattern")
    parser.add_argument("--file", type=Path, default=FILE, help=f"file of the outcomes; default {FILE}")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run whose outcomes are in the file"
    )
    given = parser.parse_args(arguments)
    if OWN_MEMORY not in os.environ and can_mount():
        command = [*mounted(SHARED_MEMORY, "50%"), sys.executable, "-m", "tests.faults", *arguments]
        os.execvpe(command[0], command, os.environ | {OWN_MEMORY: "1"})
    kept = Kept(given.file.absolute(), given.seed, resume=given.resume)
    os.chdir(REPOSITORY)  # from which ranks import their step
    with contextlib.ExitStack() as ends:
        known = faults(ends)
        chosen = {name: fault for name, fault in known.items() if re.search(given.only, name)}
        if not chosen:
            parser.error(f"--only {given.only} matches no fault; choose from: {', '.join(known)}")
        try:
            run(chosen, kept, given.count, given.seed)
            status = int(any(outcome.problems() for outcome in kept.outcomes))
        except KeyboardInterrupt:
            print("\ninterrupted; continue with --resume")
            status = INTERRUPTED
    print(table(kept.outcomes))
    print(f"seed {given.seed}; load {os.getloadavg()[2]:.1f} on {os.cpu_count()} CPUs, which delays reports")
    return status


def faults(ends: contextlib.ExitStack) -> dict[str, MakeHappen]:
    """Return what lets each fault happen, by the fault's name. Ranks start at their first fault."""

    @functools.cache
    def ranks() -> RankFaults:
        made = RankFaults()
        ends.callback(made.close)
        return made

    @functools.cache
    def runs() -> RunFaults:
        made = RunFaults()
        ends.callback(made.close)
        return made

    of_ranks: dict[str, MakeHappen] = {
        fault.name: lambda number, chance, fault=fault: ranks().fault(fault, number, chance)  # type: ignore[misc]
        for fault in RANK_FAULTS
    }
    of_runs: dict[str, MakeHappen] = {
        name: lambda number, chance, name=name: runs().fault(name, number, chance)  # type: ignore[misc]
        for name in RUN_FAULTS
    }
    return of_ranks | of_runs


def run(chosen: Mapping[str, MakeHappen], kept: Kept, count: int, seed: int) -> None:
    """Let each fault happen `count` times, in turn, and show the outcomes so far."""
    for number in range(count):
        for name, happen in chosen.items():
            if kept.has(name, number):
                continue
            # A moment depends on nothing but the seed, the fault and the number.
            outcome = happen(number, random.Random(f"{seed} {name} {number}"))
            kept.add(outcome)
            print(f"{CLEAR}{table(kept.outcomes)}" if sys.stdout.isatty() else outcome.line(), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit leaves nothing behind either
    sys.exit(main(sys.argv[1:]))
