"""How often the judge errs: whole suites are simulated, from their estimates to their verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.specs import AllReduceSpec
from ddpperf.verdict.estimates import Control, Estimates, Pair, RowKey, Stage
from ddpperf.verdict.noise import prior_of
from ddpperf.verdict.noise_classes import LAUNCH_BOUND_TOLERANCE, NoiseClass, limits_of
from ddpperf.verdict.rows import REPEATS, Finding, Row, next_plan, rows
from ddpperf.verdict.settings import Limits, Settings, read_decision
from ddpperf.verdict.verdict import Answer, Context, answer_of, decide, needs_no_repeat

METRICS = ("time", "mean_time")
ROUNDS, STEPS = 7, 16  # of a process set; of a round
COPY_SIGMA = {"gpu": 0.001, "cpu": 0.005}  # between process sets
OUTLIERS = {"gpu": 0.01, "cpu": 0.05}  # the fraction of process sets with outliers
LONGER_MEAN = {"gpu": 0.01, "cpu": 0.10}  # by how much the mean of an outlier is longer
CONTROL_SIGMA = {"gpu": 0.001, "cpu": 0.02}  # of ratios of the same process sets
SPECS = [AllReduceSpec(world_size=2, nbytes=2**20 * number) for number in range(1, 61)]
PAIRS = [Pair(base=spec, candidate=spec) for spec in SPECS]
NUMBER = {pair: number for number, pair in enumerate(PAIRS)}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A simulated suite and its machine.

    `sigmas` are the standard deviations of log times between process sets, repeated for all pairs.
    `run_sigma` is that between runs: with it, the suite is compared with a stored run. `slower` maps
    pairs to how much slower their candidate is, and `today` is how much slower the machine is than
    on the stored run's day. In the pairs of `stalls`, 1 in 100 steps takes ten times as long. `lost` is
    the fraction of the artificial delay that does not show, and `odd_set` slows one set of the base.
    With `heavy`, outliers are five times as far off. Only `in_time` pairs are measured in each repeat.
    """

    hardware: Literal["gpu", "cpu"] = "gpu"
    pairs: int = 30
    sigmas: Sequence[float] = (0.0025,)
    run_sigma: float | None = None
    comparing: bool = False
    described: str = "in CUDA graphs"
    margin: float | None = None
    heavy: bool = False
    slower: Mapping[int, float] = field(default_factory=dict)
    stalls: int = 0
    today: float = 0.0
    lost: float = 0.0
    odd_set: float = 0.0
    in_time: float = math.inf

    @property
    def settings(self) -> Settings:
        settings = read_decision({})[self.hardware]
        settings = settings if self.run_sigma is None and not self.comparing else settings.comparing()
        return settings if self.margin is None else replace(settings, margin=self.margin, metrics={})

    @property
    def noise_class(self) -> NoiseClass:
        if self.described == "launch bound":
            return NoiseClass(kind="step", described=self.described, least_tolerance=LAUNCH_BOUND_TOLERANCE)
        return NoiseClass(kind="step", described="on the CPU" if self.hardware == "cpu" else self.described)

    @property
    def limits(self) -> dict[str, Limits | None]:
        return {metric: limits_of(metric, self.noise_class, self.settings) for metric in METRICS}


@dataclass(frozen=True)
class Result:
    """How a simulated suite ended."""

    status: Status
    answer: Answer
    rows: Sequence[Row]

    @property
    def named(self) -> set[int]:
        """The numbers of the pairs that are called worse."""
        return {NUMBER[row.key.pair] for row in self.rows if row.key.pair and row.finding is Finding.WORSE}


def side(rng: np.random.Generator, suite: Suite, sets: int, rounds: int, stalls: int) -> np.ndarray:
    """Return the log times of [metric, pair, set] of one side; the metrics are those of METRICS."""
    shape = (suite.pairs, sets)
    outliers = rng.random(shape) < OUTLIERS[suite.hardware]
    common, own = rng.normal(size=shape), rng.normal(size=(2, *shape))
    logs = np.resize(suite.sigmas, suite.pairs)[:, None] * (0.8 * common + 0.6 * own)
    logs *= np.where(outliers & suite.heavy, 5, 1)
    logs[1] += np.where(outliers, LONGER_MEAN[suite.hardware], 0)
    if stalls:
        longer = 1 + 9 * rng.binomial(STEPS, 0.01, (stalls, sets, rounds)) / STEPS
        logs[0, :stalls] += np.log(np.median(longer, axis=2))
        logs[1, :stalls] += np.log(np.mean(longer, axis=2))
    return logs


def measured(
    rng: np.random.Generator, suite: Suite, stage: Stage, sets: int, chosen: Sequence[Pair]
) -> list[Estimates]:
    """Return the estimates of an A/B measurement, or of a stored run and this run, of some pairs."""
    rounds, stored = ROUNDS * (1 + (stage is Stage.REPEAT)), stage is Stage.STORED
    if stored and suite.run_sigma is not None:
        suite = replace(suite, sigmas=(suite.run_sigma,))
    base, candidate = (side(rng, suite, sets, rounds, stalls) for stalls in (0, suite.stalls))
    for number, by in suite.slower.items():
        candidate[:, number] += math.log1p(by)
    candidate += math.log1p(suite.today) if stored else 0.0
    if stage is Stage.FIRST:
        base[:, :, 0] += np.log1p(suite.odd_set)
    return [
        Estimates(
            key=RowKey(metric=metric, pair=pair),
            tests=(f"test{NUMBER[pair]}",),
            stage=stage,
            base=tuple(np.exp(base[place, NUMBER[pair]]).tolist()),
            candidate=tuple(np.exp(candidate[place, NUMBER[pair]]).tolist()),
            noise_class=suite.noise_class,
            limits=limits,
            steps=rounds * STEPS * sets,
            run_spread=suite.settings.run_spread if stored else 0.0,
        )
        for pair in chosen
        for place, (metric, limits) in enumerate(suite.limits.items())
    ]


def controls(rng: np.random.Generator, suite: Suite, like: Estimates) -> list[Estimates]:
    """Return the estimates of the control measurements; `like` are those of a time."""
    assert like.limits is not None
    shown, sets = 1 + (1 - suite.lost) * like.limits.tolerance, len(like.base)
    copies = np.exp(rng.normal(0, COPY_SIGMA[suite.hardware], sets)).tolist()
    delayed = shown * np.exp(rng.normal(0, CONTROL_SIGMA[suite.hardware], sets))
    like = replace(like, key=RowKey(metric="time", control=Control.DELAYED), base=(1.0,) * sets)
    copy = replace(like, key=RowKey(metric="time", control=Control.COPY), candidate=tuple(copies))
    if suite.hardware == "gpu":
        copy = replace(copy, noise_class=NoiseClass(kind="copy", described="copy of memory"))
    return [copy, replace(like, candidate=tuple(delayed.tolist()))]


def judged(rng: np.random.Generator, suite: Suite, mistake: str = "") -> Result:
    """Judge a suite as `Judge` does, or with a mistake: the rows' levels are not divided ("levels"), the
    repeats use the first measurement's sets again ("reuse"), or rounds are taken for sets ("rounds").
    """
    settings, all_pairs = suite.settings, PAIRS[: suite.pairs]
    seconds = dict.fromkeys(all_pairs, 1.0)
    estimates, first, tested = list[Estimates](), all_pairs, frozenset[RowKey]()
    if suite.run_sigma is not None:
        estimates += measured(rng, suite, Stage.STORED, 1, all_pairs)
        first = list(next_plan(rows(estimates, settings), seconds, suite.in_time).pairs)
    estimates += measured(rng, suite, Stage.FIRST, settings.first_sets, first)
    estimates += controls(rng, suite, estimates[-2])
    found = rows(estimates, settings)
    for _ in range(REPEATS):
        if any(row.certain for row in found) or needs_no_repeat(found):
            break
        plan = next_plan(found, seconds, suite.in_time)
        tested |= plan.tested
        again = measured(rng, suite, Stage.REPEAT, settings.repeat_sets, plan.pairs)
        if mistake == "reuse":
            firsts = {entry.key: entry for entry in estimates if entry.stage is Stage.FIRST}
            again = [replace(firsts[entry.key], stage=Stage.REPEAT) for entry in again]
        elif mistake == "rounds":
            again = [replace(e, base=e.base * ROUNDS, candidate=e.candidate * ROUNDS) for e in again]
        elif mistake == "levels":
            settings = replace(settings, false_alarms=suite.settings.false_alarms * len(tested))
        estimates += again
        found = rows(estimates, settings, tested)
    answer = answer_of(found, estimates, Context(compared_with="0001_x.json", missing={}))
    outcomes = {f"test{NUMBER[pair]}": Outcome(kind=OutcomeKind.PASSED) for pair in all_pairs}
    verdict = decide(outcomes, measured=outcomes, answer=answer)
    return Result(verdict.status, answer, found)


def results(suite: Suite, suites: int, mistake: str = "") -> list[Result]:
    rng = np.random.default_rng(1)
    return [judged(rng, suite, mistake) for _ in range(suites)]


def counted(found: Sequence[Result]) -> list[int]:
    """Return how many suites ended in FAIL, and how many in PASS."""
    return [sum(result.status is status for result in found) for status in (Status.FAIL, Status.PASS)]


GATE = Suite(sigmas=(0.002, 0.0025, 0.003))
PRECISE = Suite(pairs=10, sigmas=(0.0006, 0.0008))  # captured steps of one H200
CPU_GATE = Suite(hardware="cpu", pairs=6, sigmas=(0.045,))
COMPARISON = Suite(hardware="cpu", pairs=24, sigmas=(0.045,), comparing=True)
MIXED = replace(COMPARISON, sigmas=(0.02, 0.08))
MORE_MIXED = replace(COMPARISON, sigmas=(0.005, 0.04, 0.08))
STORED = Suite(pairs=55, run_sigma=0.0025)
OTHER_MACHINE = replace(STORED, run_sigma=0.0046)  # about as NCCL's calls differ between two machines
OTHER_DAY = replace(STORED, run_sigma=0.01, in_time=17)
NO_MARGIN = Suite(margin=0.0, sigmas=(0.03,))
EAGER = Suite(described="launch bound", pairs=10, sigmas=(0.07, 0.11, 0.15))


def few_or(many: int, few: int = 20) -> pytest.MarkDecorator:
    """Simulate few suites, or many in a slow test."""
    return pytest.mark.parametrize("suites", [few, pytest.param(many, marks=pytest.mark.slow)])


QUIET = (GATE, CPU_GATE, COMPARISON, EAGER, STORED, OTHER_MACHINE)
NO_MARGINS = (NO_MARGIN, replace(NO_MARGIN, sigmas=(0.002, 0.03, 0.07)), replace(MIXED, margin=0.0))
NOISY = (*(replace(suite, heavy=True) for suite in QUIET[:3]), MIXED, MORE_MIXED, OTHER_DAY)
EQUAL = [(0.01, 0.96, QUIET), (0.01, 0.7, NOISY), (0.015, 0.0, NO_MARGINS)]


@few_or(1000)
@pytest.mark.parametrize(
    ("fails", "passes", "suite"), [(most, least, suite) for most, least, group in EQUAL for suite in group]
)
def test_equal_code_passes(fails: float, passes: float, suite: Suite, suites: int) -> None:
    """Below 1% fail, also where a class mixes quiet and noisy pairs; without a margin, about 1%."""
    failed, passed = counted(results(suite, suites))
    assert failed < max(2, fails * suites)
    assert passed >= passes * suites - 1


@few_or(200, 10)
@pytest.mark.parametrize(
    ("suite", "slower", "by", "named"),
    [
        (GATE, 1, 0.013, 0.85),
        (PRECISE, 1, 0.005, 0.95),
        (replace(GATE, in_time=4), 26, 0.010, 0.4),
        (CPU_GATE, 1, 0.16, 0.98),
        (COMPARISON, 1, 0.25, 0.98),
        (replace(COMPARISON, sigmas=(0.08,)), 18, 0.30, 16 / 18),
        (EAGER, 1, 1.0, 0.99),
        (STORED, 1, 0.03, 0.98),
        (OTHER_DAY, 1, 0.03, 0.9),
    ],
)
def test_slower_pairs_are_named(suite: Suite, slower: int, by: float, named: float, suites: int) -> None:
    found = results(replace(suite, slower=dict.fromkeys(range(slower), by)), suites)
    failed = [result for result in found if result.status is Status.FAIL]
    fractions = [sum(pair < slower for pair in result.named) / slower for result in failed]
    assert sum(fractions) >= named * suites - 1


@few_or(300, 60)
@pytest.mark.parametrize(
    "suite",
    [
        replace(NO_MARGIN, sigmas=(0.01,)),
        pytest.param(replace(NO_MARGIN, sigmas=(0.03,)), marks=pytest.mark.slow),
    ],
)
def test_few_names_are_wrong(suite: Suite, suites: int) -> None:
    """Ten of 30 pairs are slower by twice the tolerance."""
    found = results(replace(suite, slower=dict.fromkeys(range(10), 0.04)), suites)
    wrong = [sum(pair >= 10 for pair in result.named) / max(1, len(result.named)) for result in found]
    assert np.mean(wrong) < 0.05


@few_or(1000, 50)
def test_rare_stalls_do_not_pass(suites: int) -> None:
    """If none occurs in the 336 steps of the first measurement (3%), none can be found."""
    failed, passed = counted(results(replace(GATE, stalls=1), suites))
    assert failed > 0.75 * suites
    assert passed < 0.05 * suites


@few_or(200, 30)
def test_noisy_slower_pair_does_not_pass(suites: int) -> None:
    found = results(replace(GATE, sigmas=(0.04, *[0.0025] * 29), slower={0: 0.04}), suites)
    passed = [result.rows for result in found if result.status is Status.PASS]
    undecided = [row for of_suite in passed for row in of_suite if row.open]
    assert len(passed) / suites < 0.05
    assert all(row.ratio - 1 <= row.limits.tolerance / 2 for row in undecided if row.limits is not None)


@few_or(100, 15)
@pytest.mark.parametrize("suite", [GATE, replace(GATE, sigmas=(0.01,)), CPU_GATE, MIXED, OTHER_MACHINE])
def test_rows_exclude_what_they_say(suite: Suite, suites: int) -> None:
    """Pairs are slower by up to one and a half tolerances of the time."""
    rng, judged_rows, wrong = np.random.default_rng(1), 0, 0
    for _ in range(suites):
        slower = dict(enumerate(rng.uniform(0, 1.5 * suite.settings.tolerance, suite.pairs)))
        for row in judged(rng, replace(suite, slower=slower)).rows:
            if row.key.pair is not None and row.limits is not None:
                exceeds = 1 + slower[NUMBER[row.key.pair]] > min(row.high, 1 + row.limits.tolerance)
                wrong += exceeds and row.finding is Finding.NOT_WORSE
                judged_rows += 1
    assert wrong < 0.025 * judged_rows


@few_or(200)
@pytest.mark.parametrize("suite", [GATE, STORED, CPU_GATE, COMPARISON, MIXED])
@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_lost_delay_is_noticed(suite: Suite, lost: float, suites: int) -> None:
    found = results(replace(suite, lost=lost), suites)
    texts = [[reason.text for reason in result.answer.undecided] for result in found]
    failed = sum(any("positive control" in text for text in of_suite) for of_suite in texts)
    assert failed >= 0.98 * suites - 1 if lost else failed <= max(1, 0.01 * suites)


@few_or(200)
@pytest.mark.parametrize(
    ("suite", "differs"), [(GATE, False), (replace(GATE, odd_set=0.01), True), (COMPARISON, False)]
)
def test_odd_base_set_is_noticed(suite: Suite, differs: bool, suites: int) -> None:
    noticed = sum(bool(result.answer.untrusted) for result in results(suite, suites))
    assert noticed > 0.95 * suites if differs else noticed < 0.01 * suites


@few_or(200, 5)
def test_slower_machine_is_named(suites: int) -> None:
    for result in results(replace(STORED, today=0.6), suites):
        assert result.status is Status.NO_VERDICT
        assert result.answer.undecided[0].text.startswith("this machine or its environment changed: ")


@pytest.mark.parametrize(("mistake", "suites"), [("levels", 20), ("reuse", 30), ("rounds", 5)])
def test_each_safeguard_is_needed(mistake: str, suites: int) -> None:
    """Without one of them, equal code fails far too often."""
    failed = counted(results(NO_MARGIN, suites, mistake))[0]
    assert failed >= 3


CERTAIN = lambda noises: replace(prior_of(noises), freedom=8.0)  # noqa: E731
NOISY_PAIRS = {"rows.prior_of": (CERTAIN, (0.001, 0.2)), "noise.OUTLIER_P": (0.0, (0.04, *[0.0025] * 29))}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY_PAIRS)
def test_noise_of_mixed_class_is_not_trusted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mistake, sigmas = NOISY_PAIRS[name]
    monkeypatch.setattr(f"ddpperf.verdict.{name}", mistake)
    suite = replace(COMPARISON if name == "rows.prior_of" else GATE, margin=0.0, sigmas=sigmas)
    assert counted(results(suite, 600))[0] > 8
