"""Measures how often an A/B comparison of two equal versions finds a regression by mistake.

    python -m tools.trials [cpu|cuda] [TRIALS] [SLOWER ...]

Each trial starts new process sets and compares a few training steps of two equal versions, with
margin 0. The fraction of steps that look slower must be the significance level of the screening.
For each SLOWER, such as 0.03, one step after another is slowed down by that fraction in the
candidate. A suspected or undecided step is measured again on new processes, as often as in an A/B
run. The slow-down counts as found if a later measurement calls the step worse, with the margin that
users get and the significance level of a suite of SUITE tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from scipy.stats import binomtest

from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import TrainingSpec
from ddpperf.verdict.ab import Decision, Row
from ddpperf.verdict.estimates import MetricEstimates, estimates_of
from ddpperf.verdict.settings import DecisionSettings, read_decision
from ddpperf.verdict.two_stage_test import LOOKS, Finding
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

ROUNDS = 10
# The assumed number of tests, with four metrics each, among which the significance level is divided
SUITE = 60
GPU_STEPS = [
    TrainingSpec(
        world_size=1,
        per_rank_batch_size=batch_size,
        strategy="single",
        model="resnet18_cifar",
        precision="bf16",
        memory_format="channels_last",
        execution="graph",
    )
    for batch_size in (32, 128, 256, 512)
]
CPU_STEPS = [TrainingSpec(world_size=1, per_rank_batch_size=size, strategy="single") for size in (8, 16, 32)]


def times(pool: Pool, spec: TrainingSpec, candidate: TrainingSpec | None = None) -> MetricEstimates:
    """Measure a training step of the base and of the candidate; return estimates of their times.

    candidate: the candidate's training spec, or None if it equals the base's.
    """
    estimates = estimates_of(spec.id, pool.measure(spec, candidate), {}, pool.options.device)
    return next(estimate for estimate in estimates if estimate.metric == "time")


def fresh(device: str, sets: int) -> Pool:
    """Return a pool with `sets` new process sets for the base and as many for the candidate."""
    sides = [Side(name=BASE), Side(name=CANDIDATE)]
    return Pool(
        SetOptions(size=1, device=device, rounds=ROUNDS, deadline_seconds=120), sides=sides, replicates=sets
    )


def without_margin(settings: DecisionSettings) -> DecisionSettings:
    return replace(settings, default=replace(settings.default, margin=0.0), metrics={})


def trial(
    device: str, settings: DecisionSettings, slower: Sequence[float]
) -> tuple[list[Row], dict[float, list[Row]]]:
    """Compare the training steps of two equal versions, then with one of the two slowed down.

    Returns the comparisons of equal versions, and the comparisons for each slow-down in `slower`.
    """
    steps = GPU_STEPS if device == "cuda" else CPU_STEPS
    with fresh(device, settings.default.screen_sets) as pool:
        equal = [times(pool, spec) for spec in steps]
        slowed = {
            (slow, place): replace(spec, delay_seconds=slow * median(equal[place].base))
            for slow in slower
            for place, spec in enumerate(steps)
        }
        first = {key: times(pool, steps[key[1]], spec) for key, spec in slowed.items()}
    decisions = {
        (slow, place): Decision([reading, *equal[:place], *equal[place + 1 :]], settings)
        for (slow, place), reading in first.items()
    }
    for decision in decisions.values():
        decision.gated = SUITE * 4
    for _ in range(LOOKS):
        still = [key for key, decision in decisions.items() if steps[key[1]].id in decision.open_tests()]
        if still:
            with fresh(device, settings.default.confirm_sets) as pool:
                for key in still:
                    decisions[key].look([times(pool, steps[key[1]], slowed[key])])
    found = {slow: [decisions[slow, place].rows[0] for place in range(len(steps))] for slow in slower}
    return Decision(equal, without_margin(settings)).rows, found


def main(device: str = "cpu", trials: str = "5", *slower: str) -> None:
    settings = read_decision({})["gpu" if device == "cuda" else "cpu"]
    suspected = measured = 0
    found: dict[float, list[Row]] = {float(slow): [] for slow in slower}
    for number in range(1, int(trials) + 1):
        rows, slowed = trial(device, settings, list(found))
        suspected += sum(row.finding is Finding.SUSPECT for row in rows)
        measured += len(rows)
        ratios = (f"{row.ratio:.4f}{'*' * (row.finding is Finding.SUSPECT)}" for row in rows)
        print(f"trial {number}: equal {', '.join(ratios)}", flush=True)
        for slow, answers in slowed.items():
            found[slow] += answers
            for row in answers:
                stage = "confirmed" if row.confirmed else "screened"
                what = f"{row.finding} {row.ratio:.4f} ({row.low:.4f} to {row.high:.4f}), {stage}"
                print(f"  +{slow * 100:g}% {what}", flush=True)
    interval = binomtest(suspected, measured).proportion_ci(method="exact")
    fraction, level = suspected / measured, settings.default.screen_alpha
    reach = f"{interval.low:.1%} to {interval.high:.1%}"
    print(
        f"equal sides: {suspected} of {measured} steps suspected, {fraction:.1%} ({reach}), level {level:.0%}"
    )
    for slow, answers in found.items():
        worse = sum(row.finding is Finding.WORSE for row in answers)
        print(f"+{slow * 100:g}%: {worse} of {len(answers)} found")


if __name__ == "__main__":
    main(*sys.argv[1:])
