"""How often a comparison with a stored run errs, simulated from its screening to its verdict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from scipy.stats import beta

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import Baseline, PastRun
from ddpperf.specs import AllReduceSpec, Spec, TrainingSpec
from ddpperf.verdict.ab import Decision
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.estimates import Control, MetricEstimates
from ddpperf.verdict.run_verdict import Answer, decide
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Comparison, Reference, compare
from ddpperf.verdict.two_stage_test import LOOKS, Settings

SETTINGS = read_decision({})
COPY_SIGMA = {"cpu": 0.005, "cuda": 0.001}  # between process sets; measured in A/B runs
DELAY = {"cpu": 0.25, "cuda": 0.05}  # of the positive control
ROUND_SPREAD = {"cpu": 0.02, "cuda": 0.001}
CONTROL_NOISE = 2 / 3  # the delayed step and its base are compared in the same process sets
TRAINING = [f"train{number}" for number in range(32)]
CALLS = [f"call{number}" for number in range(8)]
TESTS = [*TRAINING, *CALLS]
SUITES = 1000  # of which four false alarms would still show a rate below 1%


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The simulated machine: its noise, and how many earlier runs are stored.

    `sigma` is the standard deviation of log times between process sets, and `run_sigma` the one
    between runs. One process set in fifty is five standard deviations slower, if `heavy`.
    """

    device: Literal["cpu", "cuda"]
    sigma: float
    run_sigma: float
    heavy: bool = False
    history: int = 0

    @property
    def decision(self) -> str:
        """The name of this machine's decision settings."""
        return "gpu" if self.device == "cuda" else "cpu"


CPU = Machine(device="cpu", sigma=0.045, run_sigma=0.06)
GPU = Machine(device="cuda", sigma=0.0025, run_sigma=0.002)
OTHER_MACHINE = replace(GPU, run_sigma=0.0046)  # about as NCCL's calls differ between two machines
OTHER_DAY = replace(GPU, run_sigma=0.01)  # many tests look slower, and are measured beside the code


def spec_of(test: str) -> Spec:
    """Return the spec of a simulated test; each test has a spec of its own."""
    number = int(test.lstrip("trainclo"))
    if test in CALLS:
        return AllReduceSpec(world_size=2, nbytes=2**24 * (number + 1), execution="graph")
    return TrainingSpec(
        world_size=1, per_rank_batch_size=number + 2, strategy="single", execution="graph", drop_last=True
    )


def run_of(rng: np.random.Generator, machine: Machine, slower: Mapping[str, float]) -> dict[str, Measured]:
    """Return one run's measurements of all tests, of which `slower` maps some to log ratios."""
    measured = {}
    for test in TESTS:
        level = rng.normal(slower.get(test, 0.0), machine.run_sigma)
        rounds = np.exp(level + rng.normal(0, ROUND_SPREAD[machine.device], 10))
        sample = Sample(set="A1", side="A", torch="2", seconds=tuple((float(each),) for each in rounds))
        measured[test] = Measured(spec=spec_of(test), iterations=1, samples=(sample,))
    return measured


def beside(
    rng: np.random.Generator, machine: Machine, tests: Collection[str], sets: int, slower: Mapping[str, float]
) -> list[MetricEstimates]:
    """Return the estimates of an A/B measurement of these tests on new process sets."""

    def values(sigma: float, by: float = 0.0) -> tuple[float, ...]:
        late = 5 * sigma * (rng.random(sets) < 0.02) if machine.heavy else np.zeros(sets)
        return tuple(np.exp(by + rng.normal(0, sigma, sets) + late))

    made = []
    for test in tests:
        by = slower.get(test, 0.0)
        metrics = {"time": machine.sigma, "tail_seconds": 1.5 * machine.sigma}
        if test in TRAINING:
            metrics |= {"peak_memory_bytes": 0.0}
        if test in TRAINING[::2]:
            metrics |= {"speedup": 1.4 * machine.sigma}
        made += [
            MetricEstimates(
                test=test,
                metric=metric,
                base=values(sigma),
                candidate=values(sigma, 0.0 if metric in ("speedup", "peak_memory_bytes") else by),
                noise_class="training" if test in TRAINING else "call",
                gated=True,
                primary=metric == "time",
            )
            for metric, sigma in metrics.items()
        ]
    return made


def controls(rng: np.random.Generator, machine: Machine, sets: int) -> list[MetricEstimates]:
    """Return the control measurements: an unchanged copy, and a delayed step."""

    def made(control: Control, sigma: float, by: float, noise_class: str) -> MetricEstimates:
        return MetricEstimates(
            test=f"{control} control",
            metric="time",
            base=tuple(np.exp(rng.normal(0, sigma, sets))),
            candidate=tuple(np.exp(np.log1p(by) + rng.normal(0, sigma, sets))),
            noise_class=noise_class,
            control=control,
        )

    return [
        made("negative", COPY_SIGMA[machine.device], 0.0, "copy"),
        made("positive", CONTROL_NOISE * machine.sigma, DELAY[machine.device], "training"),
    ]


def simulated(
    rng: np.random.Generator,
    machine: Machine,
    slower: Mapping[str, float] | None = None,
    *,
    today: float = 0.0,
) -> tuple[Status, Answer]:
    """Return the verdict of one comparison with a stored run; `slower` maps tests to log ratios.

    `today` is the log ratio by which the machine is slower for all code than on the stored run's
    day.
    """
    slower = slower or {}
    whole = {test: slower.get(test, 0.0) + today for test in TESTS}
    settings = SETTINGS[machine.decision]
    history = [PastRun(measured=run_of(rng, machine, {}), promoted=True) for _ in range(machine.history)]
    then = history[-1].measured if history else run_of(rng, machine, {})
    baseline = Baseline(path=Path("0001_x.json"), measured=dict(then), when="")
    reference = Reference(baseline=baseline, settings=settings, device=machine.device, history=history)
    comparison: Comparison = compare(run_of(rng, machine, whole), reference, TESTS)
    decision = None
    if tests := comparison.to_confirm():
        between = settings.beside_stored_code(machine.device)
        sets, again = between.default.screen_sets, between.default.confirm_sets
        estimates = beside(rng, machine, tests, sets, slower) + controls(rng, machine, sets)
        decision = Decision(estimates, between, comparison.looks_slower)
        for _ in range(LOOKS):
            if open_tests := decision.open_tests():
                decision.look(beside(rng, machine, open_tests, again, slower))
        decision.end()
    answer = answer_of(comparison, decision)
    outcomes = dict.fromkeys(TESTS, Outcome(kind=OutcomeKind.PASSED))
    return decide(outcomes, measured=TESTS, answer=answer).status, answer


def false_alarms(machine: Machine, suites: int, seed: int = 23) -> tuple[int, int]:
    """Return how many unchanged suites name a slower test, and how many pass."""
    rng = np.random.default_rng(seed)
    wrong = passed = 0
    for _ in range(suites):
        status, answer = simulated(rng, machine)
        wrong += bool(answer.worse)
        passed += status is Status.PASS
    return wrong, passed


def found(machine: Machine, by: float, suites: int, seed: int = 24) -> list[float]:
    """Return for each suite the fraction of slower training tests that the answer names."""
    rng, slower = np.random.default_rng(seed), dict.fromkeys(TRAINING, float(np.log1p(by)))
    fractions = []
    for _ in range(suites):
        _, answer = simulated(rng, machine, slower)
        fractions.append(len(answer.worse.keys() & slower) / len(slower))
    return fractions


def bound(count: int, suites: int) -> float:
    """Upper 95 % bound of a rate, by Clopper and Pearson."""
    return float(beta.ppf(0.95, count + 1, suites - count))


def slow(machine: Machine, suites: int = SUITES) -> ParameterSet:
    return pytest.param(machine, suites, marks=pytest.mark.slow)


QUIETER = [replace(each, sigma=sigma) for each in (CPU, GPU) for sigma in (0.0, 0.003)]
NOISIER = [replace(each, sigma=sigma) for each in (CPU, GPU) for sigma in (0.01, 0.1)]
HEAVY = [replace(each, heavy=True) for each in (CPU, GPU)]
STORED = [replace(CPU, history=5, run_sigma=0.03), replace(GPU, history=5), OTHER_MACHINE]


@pytest.mark.parametrize(
    ("machine", "suites"), [(CPU, 20), (GPU, 20), *(slow(each) for each in (CPU, GPU, *QUIETER, *STORED))]
)
def test_unchanged_suites_pass(machine: Machine, suites: int) -> None:
    wrong, passed = false_alarms(machine, suites)
    assert wrong == 0 if suites < SUITES else bound(wrong, suites) < 0.01, wrong
    assert passed >= 0.9 * suites


@pytest.mark.parametrize(
    ("machine", "suites"),
    [(replace(CPU, sigma=0.1), 5), *(slow(each) for each in (*HEAVY, *NOISIER, OTHER_DAY))],
)
def test_noisy_suites_are_not_called_worse(machine: Machine, suites: int) -> None:
    """Most of these end without a verdict, because too few tests are decided."""
    wrong, _ = false_alarms(machine, suites)
    assert wrong == 0 if suites < SUITES else bound(wrong, suites) < 0.01, wrong


@pytest.mark.parametrize(
    ("machine", "by", "suites"),
    [
        (CPU, 0.30, 5),
        (GPU, 0.035, 5),
        pytest.param(CPU, 0.30, 100, marks=pytest.mark.slow),
        pytest.param(GPU, 0.035, 100, marks=pytest.mark.slow),
        pytest.param(OTHER_MACHINE, 0.035, 100, marks=pytest.mark.slow),
    ],
)
def test_slower_training_is_found_in_most_tests(machine: Machine, by: float, suites: int) -> None:
    """At least 90% of the slower tests are named in nearly every run, and no other test."""
    fractions = found(machine, by, suites)
    assert sum(each >= 0.9 for each in fractions) >= 0.95 * suites, min(fractions)


def test_unchanged_calls_beside_slower_steps_are_not_named() -> None:
    rng, slower = np.random.default_rng(25), dict.fromkeys(TRAINING, float(np.log1p(0.3)))
    for _ in range(5):
        status, answer = simulated(rng, CPU, slower)
        assert (status, answer.worse.keys() & set(CALLS)) == (Status.FAIL, set())


def test_a_slower_machine_is_not_called_a_regression() -> None:
    """Every test takes 60% longer than in the stored run, and as long as the stored run's code today."""
    rng, machine = np.random.default_rng(26), replace(GPU, sigma=0.001)
    for _ in range(3):
        status, answer = simulated(rng, machine, today=0.6)
        assert (status, answer.worse) == (Status.NO_VERDICT, {})
        assert answer.undecided[0].startswith("this machine or its environment changed: ")


def test_laxer_levels_call_unchanged_code_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the simulation can see levels that are wrong."""
    monkeypatch.setattr(Settings, "look_alpha", lambda self, gated, suspect: self.screen_alpha)
    machine = replace(OTHER_DAY, sigma=0.1)
    wrong, _ = false_alarms(machine, 10)
    assert wrong >= 3
