"""The rounds of a measurement: their length, the order of base and candidate, and repeated rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from ddpperf.machine.utilization import Recorder
from ddpperf.specs import Spec
from ddpperf.workers.process_set import Answers, ProcessSet, Progress

Job = tuple[ProcessSet, Spec]  # a process set, and what it measures
Seconds = tuple[float, ...]  # each rank's duration of one round
ROUND_SECONDS = {"cpu": 0.15, "cuda": 0.05}  # a round takes about this long, or one step
# A step of this length on a CPU replaces the contents of the caches, so it needs no untimed step before
# it. Without untimed steps, four process sets on 2 cores alternate faster. Their times of a step of 200 ms
# differ by 2.2%, not by 4.2%, and the rounds take two thirds of the time.
LONG_STEP_SECONDS = 0.01


def calibrated(process_set: ProcessSet, spec: Spec, limit: int, parts: int = 1) -> int:
    """Return how many steps a timed round should have, found by ever longer trial rounds.

    limit: the most steps that a round may have. parts: the number of parts into which a usual round
    is divided.
    """
    round_seconds = ROUND_SECONDS[process_set.options.device]
    iterations = 1
    while True:
        seconds = spec.calls * max(sample(process_set, spec, iterations))
        if seconds >= round_seconds / 8 or iterations * 4 > limit:
            return choose_iterations(seconds / iterations, limit, round_seconds / parts)
        iterations *= 4


def choose_iterations(step_seconds: float, limit: int, round_seconds: float) -> int:
    """Return how many steps make a round of about `round_seconds` seconds, as a power of two.

    limit: the most steps that a round may have.
    """
    wanted = min(max(1.0, round_seconds / max(step_seconds, 1e-9)), limit)
    return 1 << math.floor(math.log2(wanted))


def sample_rounds(
    jobs: list[Job],
    iterations: int,
    *,
    rounds: int,
    enough_seconds: float,
    check: Callable[[list[int], int], str],
    progress: Callable[[int, float], None],
    recorders: Mapping[str, Recorder],
) -> dict[str, list[Seconds]]:
    """Measure up to `rounds` rounds on each process set and return their durations in seconds.

    Measuring stops early when the rounds have taken `enough_seconds` in total. A round that `check`
    calls spoiled is measured again, by all process sets in the same order. This happens at most
    `rounds` times, and only until spoiled rounds have taken `enough_seconds`. Later spoiled rounds
    count. check: `check_round` of the pool. progress: called with the number of rounds that count
    so far, and the fraction of the next round that is done. recorders: for each process set, what
    records the energy and the utilization of its devices in its rounds.
    """
    processes = [pid for live, _ in jobs for pid in live.pids.values()]
    kept: list[dict[str, Seconds]] = []
    sides = [live.side.name for live, _ in jobs]
    is_balanced = sides == sides[::-1]
    warm, again = False, 0
    kept_seconds = again_seconds = 0.0
    check(processes, 0)
    progress(0, 0.0)
    while len(kept) < rounds and kept_seconds < enough_seconds:
        index = len(kept)
        # The order is A B, B A, ..., or A B B A in every round, so that drift affects base and candidate
        # alike. Reversing A B B A would let the first process set follow itself, and never one of B.
        order = jobs if is_balanced or index % 2 == 0 else jobs[::-1]
        taken = {}
        for live, spec in order:
            with recorders[live.name].round(iterations + (spec.repeats and not warm)):
                taken[live.name] = sample(live, spec, iterations, partial(progress, index), warm=warm)
        lasted = sum(map(max, taken.values()))
        if check(processes, index + 1) and again < rounds and again_seconds < enough_seconds:
            again, again_seconds = again + 1, again_seconds + lasted
            continue
        kept.append(taken)
        kept_seconds += lasted
        # On a CPU the caches of a process set that is measured alone stay warm from round to round.
        shortest = min(map(max, taken.values())) / iterations
        warm = live.options.device == "cpu" and (len(jobs) == 1 or shortest >= LONG_STEP_SECONDS)
        progress(index + 1, 0.0)
    return {live.name: [taken[live.name] for taken in kept] for live, _ in jobs}


def sample(
    process_set: ProcessSet, spec: Spec, iterations: int, progress: Progress = None, *, warm: bool = False
) -> Seconds:
    """Measure one round on a process set and return each rank's duration in seconds.

    warm: leave out the untimed step before the timed steps, unless ranks take turns.
    """
    answers: Answers = {}
    turns = spec.turns(process_set.options.devices_in_turn)
    untimed = not warm or len(turns) > 1
    for ranks in turns:
        answers |= process_set.request(
            "sample", ranks=ranks, progress=progress, iterations=iterations, untimed=untimed
        )
    return tuple(answers[rank]["seconds"] for rank in sorted(answers))
