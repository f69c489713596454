"""The rounds of a measurement: how many steps one has; each on all process sets in turn, and once more if it was spoiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ddpperf.specs import Spec
from ddpperf.workers.channel import Message
from ddpperf.workers.process_set import ProcessSet

Job = tuple[ProcessSet, Spec]  # a set, and what it measures
Seconds = tuple[float, ...]  # of one round, by rank
ROUND_SECONDS = {"cpu": 0.15, "cuda": 0.05}  # a round lasts about this long, or one step


def calibrated(process_set: ProcessSet, spec: Spec, limit: int, parts: int = 1) -> int:
    """Steps in a round, from untold rounds of 1, 4, 16, ... steps, the last of which is long enough to be believed.

    parts: of a usual round, that this one is one of.
    """
    round_seconds = ROUND_SECONDS[process_set.device]
    iterations = 1
    while True:
        seconds = spec.calls * max(sample(process_set, spec, iterations))
        if seconds >= round_seconds / 8 or iterations * 4 > limit:
            return choose_iterations(seconds / iterations, limit, round_seconds / parts)
        iterations *= 4


def choose_iterations(step_seconds: float, limit: int, round_seconds: float) -> int:
    """Steps in a round, so that it lasts about `round_seconds`: a power of two, so that equal work gets equal rounds."""
    wanted = min(max(1.0, round_seconds / max(step_seconds, 1e-9)), limit)
    return 1 << math.floor(math.log2(wanted))


def sample_rounds(
    jobs: list[Job],
    iterations: int,
    *,
    rounds: int,
    enough_seconds: float,
    look: Callable[[list[int], int], str],
    tell: Callable[[int, float], None],
) -> dict[str, list[Seconds]]:
    """By set, the seconds of each of `rounds` rounds, or of as many as last `enough_seconds` in all.

    A round that `look` calls spoiled is measured again, by all sets in the same order. At most `rounds` rounds are measured
    again, and no more when those have lasted `enough_seconds`; a round that is spoiled after that counts as it is.
    look: called with the process ids of all ranks and the number of rounds done, the one that has just ended among them, before
    the first round and after each; answers what spoiled it, an empty string if nothing did. tell: told the number of rounds
    that count so far, and the part of the next that is done.
    """
    processes = [rank.pid for process_set, _ in jobs for rank in process_set.ranks]
    kept: list[dict[str, Seconds]] = []
    again = 0
    kept_seconds = again_seconds = 0.0
    look(processes, 0)
    tell(0, 0.0)  # time left counts from here
    while len(kept) < rounds and kept_seconds < enough_seconds:
        index = len(kept)
        taken: dict[str, Seconds] = {}
        for process_set, spec in (
            jobs if index % 2 == 0 else reversed(jobs)
        ):  # A B B A: drift meets both sides alike
            process_set.progress = partial(tell, index)
            taken[process_set.name] = sample(process_set, spec, iterations)
        lasted = sum(map(max, taken.values()))
        if look(processes, index + 1) and again < rounds and again_seconds < enough_seconds:
            again += 1
            again_seconds += lasted
            continue
        kept.append(taken)
        kept_seconds += lasted
        tell(index + 1, 0.0)
    return {process_set.name: [taken[process_set.name] for taken in kept] for process_set, _ in jobs}


def sample(process_set: ProcessSet, spec: Spec, iterations: int) -> Seconds:
    """Seconds of one round by rank."""
    answers: dict[int, Message] = {}
    for ranks in spec.turns(process_set.size):
        answers |= process_set.request("sample", ranks=ranks, iterations=iterations)
    return tuple(answers[rank]["seconds"] for rank in sorted(answers))
