"""Does the decision err as often as it says? Real trials here: python docs/trials.py [cpu|cuda] [TRIALS] [SLOWER ...]

Each trial starts fresh process sets of two equal sides and measures a few steps at the first look, with margin 0: the share of
steps that are suspected must be the level. For each SLOWER, such as 0.03, one step is slowed down by that on the candidate's
side, and is found if it is suspected and fresh sets then call it worse, with the margin that users get.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median

from scipy.stats import binomtest

from ddpperf.analysis.against import Decision
from ddpperf.analysis.decision import Finding
from ddpperf.analysis.readings import Reading, readings_of
from ddpperf.analysis.settings import DecisionSettings, read_decision
from ddpperf.results import BASE, CANDIDATE
from ddpperf.specs import TrainingSpec
from ddpperf.workers.pool import Pool
from ddpperf.workers.rank_process import Side

ROUNDS = 10
SUITE = 60  # tests of four gated metrics each, of which these would be some: what a second look must make up for
GPU_STEPS = [
    TrainingSpec(
        world_size=1,
        per_rank_batch_size=batch_size,
        strategy="single",
        model="resnet18_cifar",
        precision="bf16",
        memory_format="channels_last",
        form="graph",
    )
    for batch_size in (32, 128, 256, 512)
]
CPU_STEPS = [TrainingSpec(world_size=1, per_rank_batch_size=size, strategy="single") for size in (8, 16, 32)]


def times(pool: Pool, spec: TrainingSpec, candidate: TrainingSpec | None = None) -> Reading:
    """Both sides' times of a step."""
    readings = readings_of(spec.id, pool.measure(spec, candidate), {}, pool.device)
    return next(each for each in readings if each.metric == "time")


def fresh(device: str, sets: int) -> Pool:
    sides = [Side(name=BASE), Side(name=CANDIDATE)]
    return Pool(size=1, device=device, rounds=ROUNDS, deadline_seconds=120, sides=sides, replicates=sets)


def without_margin(settings: DecisionSettings) -> DecisionSettings:
    return replace(settings, default=replace(settings.default, margin=0.0), metrics={})


def decided(device: str, settings: DecisionSettings, spec: TrainingSpec, slowed: TrainingSpec, first: list[Reading]) -> str:
    """What becomes of a step that is slower on the candidate's side, first of the readings, the others being as they are."""
    decision = Decision(first, settings)
    decision.gated = SUITE * 4
    if decision.suspects() != [spec.id]:
        return f"not suspected: {decision.rows[0].ratio:.4f}"
    with fresh(device, settings.default.confirm_sets) as pool:
        decision.confirm([times(pool, spec, slowed)])
    row = decision.rows[0]
    return f"{row.finding}: {row.ratio:.4f} ({row.low:.4f} to {row.high:.4f})"


def main(device: str = "cpu", trials: str = "20", *slower: str) -> None:
    settings = read_decision({}, name="built in")["gpu" if device == "cuda" else "cpu"]
    steps = GPU_STEPS if device == "cuda" else CPU_STEPS
    suspected, detected = 0, dict.fromkeys(slower, 0)
    for trial in range(1, int(trials) + 1):
        with fresh(device, settings.default.screen_sets) as pool:
            first = [times(pool, spec) for spec in steps]
            slowed = {slow: replace(steps[0], delay_seconds=float(slow) * median(first[0].base)) for slow in slower}
            again = {slow: times(pool, steps[0], slowed[slow]) for slow in slower}
        rows = Decision(first, without_margin(settings)).rows
        suspected += sum(row.finding is Finding.SUSPECT for row in rows)
        told = [f"{row.ratio:.4f}{'*' * (row.finding is Finding.SUSPECT)}" for row in rows]
        for slow in slower:
            answer = decided(device, settings, steps[0], slowed[slow], [again[slow], *first[1:]])
            detected[slow] += answer.startswith(Finding.WORSE)
            told.append(f"+{float(slow):.0%} {answer}")
        print(f"trial {trial}: {'; '.join(told)}", flush=True)
    count = int(trials) * len(steps)
    interval = binomtest(suspected, count).proportion_ci(method="exact")
    share, level = suspected / count, settings.default.screen_alpha
    reach = f"{interval.low:.1%} to {interval.high:.1%}"
    print(f"equal sides: {suspected} of {count} steps suspected, {share:.1%} ({reach}); the level is {level:.0%}")
    for slow, number in detected.items():
        print(f"+{float(slow):.0%}: {number} of {trials} found")


if __name__ == "__main__":
    main(*sys.argv[1:])
