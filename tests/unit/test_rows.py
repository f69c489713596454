"""What each stage of a comparison can find, and what is measured next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import (
    AllReduceSpec,
    CollectiveSpec,
    EpochSpec,
    MessagesSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    TrainingSpec,
)
from ddpperf.verdict.estimates import Estimates, Pair, RowKey, Stage, ab_estimates, stored_estimates
from ddpperf.verdict.noise import MOST_PRIOR_FREEDOM
from ddpperf.verdict.noise_classes import SMALL_CALL_TOLERANCE, class_of, limits_of
from ddpperf.verdict.rows import Finding, Row, next_plan, noises, only_the_machine_changed, rows
from ddpperf.verdict.settings import Settings, read_decision
from tests.generated import TWO
from tests.judged import CAPTURED as CLASS
from tests.judged import GPU, LIMITS, QUIET, equal, estimate, judged, key, pair, row_of

CPU = read_decision({})["cpu"]
WIDE = replace(LIMITS, tolerance=0.03)
STEP = TrainingSpec(**TWO, strategy="ddp")
CAPTURED = replace(STEP, execution="graph")
BROADCAST = CollectiveSpec(world_size=2, nbytes=2**24, kind="broadcast", execution="graph")


def measured(
    spec: Spec, *by_round: float, counters: dict[str, float] | None = None, iterations: int = 1
) -> Measured:
    """Return what one process set measured; `by_round` are the seconds of a step in each round."""
    ranks = {name: (value,) * spec.world_size for name, value in (counters or {}).items()}
    rounds = tuple((seconds * iterations,) * spec.world_size for seconds in by_round)
    sample = Sample(set="A1", side="A", torch="2.11", seconds=rounds, counters=ranks)
    return Measured(spec=spec, iterations=iterations, samples=(sample,))


# --- what is judged, and by which limits


@pytest.mark.parametrize(
    ("spec", "device_seconds", "settings", "tolerance"),
    [
        (CAPTURED, 0.001, GPU, 0.02),
        (CAPTURED, 0.001, GPU.comparing(), 0.03),
        (AllReduceSpec(world_size=2, nbytes=2**24, execution="graph"), 0, GPU, 0.02),
        (AllReduceSpec(world_size=2, nbytes=1024, execution="graph"), 0, GPU, 0.03),
        (AllReduceSpec(world_size=2, nbytes=1024, execution="graph"), 0, GPU.comparing(), 0.03),
        (BROADCAST, 0, GPU, 0.02),
        (replace(BROADCAST, nbytes=2**23), 0, GPU, SMALL_CALL_TOLERANCE),
        (replace(BROADCAST, kind="all_to_all"), 0, GPU, 0.03),  # of messages of half the buffer
        (STEP, 0.01, GPU, 0.25),
        (STEP, 0.005, GPU, 0.50),
        (STEP, 0, CPU, 0.16),
        (STEP, 0, CPU.comparing(), 0.25),
        (AllReduceSpec(world_size=2, nbytes=2**24), 0, CPU, 0.16),
        (AllReduceSpec(world_size=2, nbytes=1024), 0, GPU, None),
        (AllReduceSpec(world_size=2, nbytes=1024), 0, CPU, None),
        (MessagesSpec(**TWO, strategy="ddp"), 0, GPU, None),
        (SamplerSpec(world_size=2, epoch_images=10), 0, CPU, None),
    ],
)
def test_tolerance_follows_the_kind_of_work(
    spec: Spec, device_seconds: float, settings: Settings, tolerance: float | None
) -> None:
    """A step of 10 ms whose kernels take 5 ms waits for launches, unless it is in a CUDA graph."""
    counters = {"device_seconds": device_seconds} if device_seconds else {}
    noise_class = class_of(measured(spec, 0.01, 0.01, counters=counters), settings.device)
    limits = limits_of("time", noise_class, settings)
    assert (limits and limits.tolerance) == tolerance


def test_mean_of_calls_is_not_judged_on_a_cpu() -> None:
    """Other programs stall single calls there."""
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    for spec, settings, counts in ((call, CPU, False), (STEP, CPU, True), (call, GPU, True)):
        noise_class = class_of(measured(spec, 0.01, 0.01), settings.device)
        assert (limits_of("mean_time", noise_class, settings) is not None) == counts


@pytest.mark.parametrize(
    ("ratio", "noise", "is_open"),
    [(1.0, 0.2, False), (1.2, 0.2, True), (1.5, 0.01, True), (1.0, 0.01, False)],
)
def test_noisy_call_on_a_cpu_is_repeated_only_if_it_looks_slower(
    ratio: float, noise: float, is_open: bool
) -> None:
    """Else it is undecided, and a PASS says so. A step with this noise is repeated."""
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    for spec, expected in ((call, is_open), (STEP, is_open or noise > 0.1)):
        estimates = ab_estimates({"t": two_sides(spec, ratio, noise, {})}, {}, CPU, Stage.FIRST)
        (row,) = (row for row in judged(estimates, CPU) if row.key.metric == "time")
        assert row.open == expected
        assert (row.finding is Finding.UNDECIDED) == (is_open or noise > 0.1)


def test_noisy_call_against_the_stored_run_alone_is_open() -> None:
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    then, now = (measured(call, *(0.01,) * 4) for _ in range(2))
    found = judged(stored_estimates({"t": then}, {"t": now}, CPU, {}, {}), CPU)
    assert [row.open for row in found if row.key.metric == "time"] == [True]


def test_only_a_cpu_has_other_classes_for_several_ranks() -> None:
    """There, ranks that wait for each other vary more than one that waits for nobody."""
    alone = replace(STEP, strategy="single", world_size=1)
    for device, differ in (("cpu", True), ("cuda", False)):
        several, one = (class_of(measured(spec, 0.01, 0.01), device) for spec in (STEP, alone))
        assert (several != one) == differ


def two_sides(spec: Spec, ratio: float, noise: float, counters: dict[str, float]) -> Measured:
    """Return three process sets of each side; the candidate's steps are longer by a ratio.

    noise: by which fraction each set of a side is slower than the one before.
    """
    samples = []
    for place in range(6):
        one = measured(spec, *(0.01 * (ratio if place % 2 else 1) * (1 + noise * (place // 2)),) * 4)
        ranks = {name: (value,) * spec.world_size for name, value in counters.items()}
        fields: dict[str, Any] = {"set": f"{'AB'[place % 2]}{place}", "side": "AB"[place % 2]}
        samples.append(replace(one.samples[0], **fields, counters=ranks))
    return Measured(spec=spec, iterations=1, samples=tuple(samples))


def test_doubled_launch_bound_step_is_worse() -> None:
    """Its process sets differ by 10%."""
    counters = {"device_seconds": 0.005}
    estimates: list[Estimates] = []
    for stage in (Stage.FIRST, Stage.REPEAT):
        estimates += ab_estimates({"t": two_sides(STEP, 2.0, 0.1, counters)}, {}, GPU, stage)
    found = {row.key.metric: row for row in judged(estimates)}
    assert found["time"].finding is Finding.WORSE
    assert found["time"].ratio == pytest.approx(2)


def test_base_says_whether_a_step_is_launch_bound() -> None:
    """The base keeps its GPU busy. The candidate waits as long again, and needs the same GPU time."""
    run = two_sides(STEP, 2.0, 0.001, {"device_seconds": 0.0099})
    found = ab_estimates({"t": run}, {}, GPU, Stage.FIRST)
    (time,) = (entry for entry in found if entry.key.metric == "time")
    assert time.limits is not None
    assert time.limits.tolerance == 0.25


@pytest.mark.parametrize("settings", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("cores", "finding"),
    [(0.05, Finding.NOT_WORSE), (0.15, Finding.WORSE)],
)
def test_tenth_of_a_core_between_rounds_is_worse(settings: Settings, cores: float, finding: Finding) -> None:
    """The processes of the base use no core between their rounds."""
    run = two_sides(STEP, 1.0, 0.001, {})
    busy = [
        replace(sample, counters={"idle_cpu_seconds": (used / 2,) * 2, "idle_seconds": (1.0,) * 2})
        for sample in run.samples
        for used in [cores if sample.side == "B" else 0.0]
    ]
    run = replace(run, samples=tuple(busy))
    estimates = [
        entry
        for stage in (Stage.FIRST, Stage.REPEAT)
        for entry in ab_estimates({"t": run}, {}, settings, stage)
    ]
    found = {row.key.metric: row.finding for row in judged(estimates, settings)}
    assert found["idle_cpus"] is finding


def test_speedups_and_cpu_seconds_are_not_judged() -> None:
    run = two_sides(STEP, 1.0, 0.1, {"cpu_seconds": 0.01, "peak_memory_bytes": 1e9})
    speedup = {"speedup": {"by_set": {sample.set: 1.5 for sample in run.samples}}}
    found = judged(ab_estimates({"t": run}, {"t": speedup}, GPU, Stage.FIRST))
    assert {row.key.metric for row in found} == {"time", "mean_time", "peak_memory_bytes"}


# --- the powers of the stages


def test_first_measurement_clears_or_leaves_open() -> None:
    assert row_of(equal(8)).finding is Finding.NOT_WORSE
    slower = row_of([estimate(1, 1.5), *equal(8)[2:]])
    assert (slower.finding, slower.open, slower.suspicious) == (Finding.UNDECIDED, True, True)
    within = row_of([estimate(1, 1.011), *equal(8)[2:]])
    assert within.high < 1.02, "it is no slower than its tolerance, but slower than its margin"
    assert (within.finding, within.suspicious) == (Finding.UNDECIDED, True)


@pytest.mark.parametrize(
    ("ratio", "finding"), [(1.004, Finding.NOT_WORSE), (1.03, Finding.WORSE), (0.9, Finding.NOT_WORSE)]
)
def test_repeat_decides_by_its_own_sets(ratio: float, finding: Finding) -> None:
    """The first measurement saw a slow-down of 50%, by which the row was selected."""
    first, again = estimate(1, 1.5, noise=0.3), estimate(1, ratio, stage=Stage.REPEAT, sets=12)
    again = replace(again, base=again.base * 8, candidate=again.candidate * 8)
    found = row_of([first, again])
    assert (found.finding is Finding.WORSE) == (finding is Finding.WORSE)
    if finding is Finding.WORSE:
        assert found.ratio == pytest.approx(ratio)


def test_row_without_a_planned_and_measured_repeat_is_not_worse() -> None:
    """The first measurement chose the row, so it alone proves nothing."""
    first, repeat = estimate(1, 1.5), estimate(1, 1.5, stage=Stage.REPEAT)
    assert not any(row.certain for row in rows([first, repeat], GPU, tested=()))
    assert not any(row.certain for row in rows([first], GPU, tested={key(1)})), "it was interrupted"


def test_first_measurement_does_not_count_in_the_test_of_a_repeat() -> None:
    found = row_of([estimate(1, 1.5), estimate(1, 1.004, stage=Stage.REPEAT)])
    assert (found.finding, found.suspicious) == (Finding.UNDECIDED, False)
    assert found.p > 0.5


def test_level_is_divided_by_the_tested_rows() -> None:
    """A slow-down that is certain if one row was tested is not certain among 1,000."""
    estimates = [estimate(1, 1.5), estimate(1, 1.0077, stage=Stage.REPEAT)]
    more = [key(number) for number in range(2, 1000)]
    assert [any(row.certain for row in rows(estimates, GPU, {key(1), *others})) for others in ([], more)] == [
        True,
        False,
    ]


def test_both_values_of_a_certain_row_give_its_ratio() -> None:
    """They are those of the repeat. The first measurement, which chose the row, shows a larger change."""
    (row,) = rows([estimate(1, 1.5), estimate(1, 1.03, stage=Stage.REPEAT)], GPU, {key(1)})
    assert row.certain
    assert row.candidate / row.base == pytest.approx(row.ratio) == pytest.approx(1.03, abs=1e-4)


def test_each_of_two_repeats_has_half_of_the_level() -> None:
    """Without a change, 1% of the runs may fail: 0.5% by the first repeat, and 0.5% by the second."""
    (row,) = rows([estimate(1, 1.5), estimate(1, 1.0066, stage=Stage.REPEAT)], GPU, {key(1)})
    assert GPU.false_alarms / 2 < row.p < GPU.false_alarms
    assert not row.certain


@pytest.mark.parametrize(
    "fields", [{"noise_class": replace(CLASS, described="outside of CUDA graphs")}, {"metric": "mean_time"}]
)
def test_noise_is_that_of_the_same_class_and_metric(fields: dict[str, Any]) -> None:
    """The others vary 100 times as much. Each class and metric alone has equal noises, so it counts fully."""
    quiet = [estimate(number) for number in range(1, 7)]
    noisy = [estimate(number, noise=0.1, **fields) for number in range(7, 13)]
    found = noises({entry.key: [entry] for entry in [*quiet, *noisy]})
    for entries, deviation in ((quiet, QUIET), (noisy, 0.1)):
        for entry in entries:
            noise = found[entry.key]
            assert noise.freedom == 4 + MOST_PRIOR_FREEDOM
            assert noise.variance == pytest.approx(deviation**2, rel=0.2)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "named"), [(1.0072, 0.01, 0.05, True), (1.0062, 0.05, 0.2, False)]
)
def test_further_names_are_wrong_once_in_twenty(ratio: float, low: float, high: float, named: bool) -> None:
    """Of two tested rows, one is certain. The other needs a p of at most 5%."""
    estimates = [estimate(1, 1.1), estimate(1, 1.1, stage=Stage.REPEAT), estimate(2, ratio)]
    (other,) = (row for row in judged(estimates) if row.tests == ("test2",))
    assert low < other.p < high
    assert (other.finding is Finding.WORSE) == named


def test_slower_steps_make_it_no_easier_to_name_a_call() -> None:
    """Nine of ten steps are certainly worse. An equal call is as slow as a step that is named with them."""
    steps = [estimate(n, 1.1, stage=stage) for n in range(1, 10) for stage in (Stage.FIRST, Stage.REPEAT)]
    others = [estimate(20, 1.0072)]
    calls = [
        estimate(n, 1.0072 if n == 30 else 1.0, noise_class=replace(CLASS, kind="call"))
        for n in range(30, 40)
    ]
    worse = {
        name
        for row in judged([*steps, *others, *calls])
        if row.finding is Finding.WORSE
        for name in row.tests
    }
    assert worse == {f"test{n}" for n in (*range(1, 10), 20)}


@pytest.mark.parametrize(
    ("bytes_seen", "finding"),
    [
        ((9,), Finding.UNDECIDED),
        ((9, 9), Finding.WORSE),
        ((9, 8), Finding.NOT_WORSE),
        ((7, 7), Finding.NOT_WORSE),
    ],
)
def test_bytes_that_grow_twice_are_worse(bytes_seen: tuple[float, ...], finding: Finding) -> None:
    """The base sends 8 bytes."""
    stages = [Stage.FIRST, Stage.REPEAT]
    entries = [
        replace(
            estimate(1, metric="gradients_bytes", stage=stage),
            base=(8.0,) * 3,
            candidate=(8.0, float(seen), 8.0),
        )
        for stage, seen in zip(stages, bytes_seen, strict=False)
    ]
    assert row_of(entries, metric="gradients_bytes").finding is finding


# --- the stored run


def stored(ratios: list[float], **fields: Any) -> list[Row]:
    return judged(
        [estimate(number, ratio, stage=Stage.STORED, **fields) for number, ratio in enumerate(ratios, 1)]
    )


def test_stored_run_clears_but_never_fails() -> None:
    found = stored([1.0, 1.001, 0.999, 0.998, 1.3], limits=WIDE)
    assert [row.finding for row in found] == [Finding.NOT_WORSE] * 4 + [Finding.UNDECIDED]
    assert [row.stored_slower for row in found] == [False] * 4 + [True]


def test_slower_machine_clears_nothing() -> None:
    """All tests take 60% longer, so that the median of the class is no sign of a changed test."""
    found = stored([1.6, 1.601, 1.599, 1.598, 1.602])
    assert all(row.open and row.suspicious and row.stored_slower for row in found)


def test_time_of_an_epoch_is_the_mean_over_its_rounds() -> None:
    """It shows an epoch that takes longer than most. A mean of its own could be missing in an A/B run."""
    epoch = EpochSpec(**TWO, strategy="ddp", epoch_images=64, input="device")
    then, now = measured(epoch, 0.2, 0.2, 0.2), measured(epoch, 0.2, 0.2, 0.5)
    found = {row.key.metric: row for row in judged(stored_estimates({"t": then}, {"t": now}, GPU, {}, {}))}
    assert found["time"].ratio == pytest.approx(1.5)
    assert "mean_time" not in found


def test_scattered_rounds_of_the_stored_run_clear_no_mean() -> None:
    """The mean of ten such rounds is known to 11%, and their median is as it was."""
    run = measured(CAPTURED, *(0.01, 0.02) * 5, iterations=100)
    found = {row.key.metric: row for row in judged(stored_estimates({"t": run}, {"t": run}, GPU, {}, {}))}
    assert found["time"].finding is Finding.NOT_WORSE
    assert found["mean_time"].finding is Finding.UNDECIDED


# --- what is measured next


def plan_of(found: list[Row], seconds: float, time_left: float) -> list[int]:
    plan = next_plan(found, {pair(number): seconds for number in range(1, 9)}, time_left)
    assert plan.tested <= {row.key for row in found if row.open}
    assert {row.pair for row in plan.tested} <= set(plan.pairs)
    assert len(plan.pairs) + plan.left == len({row.key.pair for row in found if row.open} or plan.pairs)
    return [number for chosen in plan.pairs for number in range(1, 9) if chosen == pair(number)]


def test_most_suspicious_pairs_are_measured_first() -> None:
    found = judged([estimate(1, 1.01), estimate(2, 1.5), estimate(3, 1.2), estimate(4)])
    assert [row.open for row in found] == [True, True, True, False]
    assert plan_of(found, 1.0, 10.0) == [2, 3, 1]
    assert plan_of(found, 1.0, 2.5) == [2, 3], "as many as have time"
    assert plan_of(found, 1.0, -1.0) == [2], "but at least one"


@pytest.mark.parametrize("metric", ["mean_time", "peak_memory_bytes"])
def test_pair_with_another_open_metric_than_its_time_is_measured(metric: str) -> None:
    found = judged([*equal(3), estimate(4), estimate(4, 1.5, metric=metric)])
    assert [(row.key, row.open) for row in found if row.open] == [(key(4, metric), True)]
    assert plan_of(found, 1.0, 10.0) == [4]


def test_repeated_pair_waits_for_one_that_was_not_repeated() -> None:
    """Its repeat did not see what the first measurement had seen."""
    first = [estimate(1, 1.3), estimate(2, 1.1)]
    found = judged([*first, estimate(1, 1.0, noise=0.004, stage=Stage.REPEAT)])
    assert [row.open for row in found] == [True, True]
    assert plan_of(found, 1.0, 1.0) == [2]


@pytest.mark.parametrize("tested", [(), (RowKey(metric="idle_cpus"),)])
def test_without_an_open_pair_the_shortest_is_measured(tested: tuple[RowKey, ...]) -> None:
    """It serves the controls, and a row without a pair, such as that of idle processes."""
    found = judged([*equal(3), *(estimate(1, 20.0, key=idle, tests=()) for idle in tested)])
    plan = next_plan(found, {pair(number): 1 / number for number in range(1, 9)}, 10.0)
    assert (plan.pairs, plan.tested, plan.left) == ((pair(3),), frozenset(tested), 0)


def test_first_measurement_has_a_step_to_delay() -> None:
    """Only a whole training is open, whose many steps cannot be delayed."""
    training = RunSpec(**TWO, strategy="ddp", input="device", epochs=1, test_images=8, rate=0.1)
    whole = Pair(base=training, candidate=training)
    of_run = replace(estimate(9, 1.5, stage=Stage.STORED), key=RowKey(metric="time", pair=whole))
    then = [of_run, *(estimate(number, stage=Stage.STORED, limits=WIDE) for number in (1, 2))]
    seconds = {whole: 9.0, pair(1): 2.0, pair(2): 1.0}
    found = judged(then)
    plan = next_plan(found, seconds, 10.0)
    assert [row.open for row in found] == [True, False, False]
    assert (plan.pairs, plan.tested, plan.left) == ((whole, pair(2)), frozenset([of_run.key]), 0)
    tight = judged([of_run, estimate(1, stage=Stage.STORED), estimate(2, stage=Stage.STORED, limits=WIDE)])
    assert next_plan(tight, seconds, 10.0).pairs == (whole, pair(1)), "whose tolerance is the smallest"
    again = judged([*then, replace(of_run, stage=Stage.FIRST, base=(1.0, 1.0), candidate=(1.5, 1.5))])
    assert next_plan(again, seconds, 10.0).pairs == (whole,), "the controls have been measured"


def test_comparison_of_whole_trainings_alone_is_measured_ab() -> None:
    """Without it, neither a control nor the stored code says that this machine is as it was."""
    training = RunSpec(**TWO, strategy="ddp", input="device", epochs=1, test_images=8, rate=0.1)
    whole = Pair(base=training, candidate=training)
    found = judged([replace(estimate(9, stage=Stage.STORED), key=RowKey(metric="time", pair=whole))])
    assert not found[0].open
    assert next_plan(found, {whole: 9.0}, 10.0).pairs == (whole,)


@pytest.mark.parametrize(("unmeasured", "changed"), [(1.06, True), (1.12, False)])
def test_test_that_stands_out_is_measured_on_a_changed_machine(unmeasured: float, changed: bool) -> None:
    stored_run = [estimate(n, 1.06, stage=Stage.STORED, limits=WIDE) for n in range(1, 10)]
    last = estimate(10, unmeasured, stage=Stage.STORED, limits=WIDE)
    found = judged([*stored_run, last, *(estimate(n, limits=WIDE) for n in range(1, 10))])
    assert only_the_machine_changed(found) == changed


@pytest.mark.parametrize(
    ("step_seconds", "iterations", "devices", "clears"),
    [
        *((0.001, 32, 1, True), (0.001, 16, 1, False), (0.06, 4, 1, True), (0.06, 2, 1, False)),
        *((0.001, 8, 4, True), (0.001, 4, 4, False)),
    ],
)
def test_stored_mean_needs_many_steps_or_a_long_time(
    step_seconds: float, iterations: int, devices: int, clears: bool
) -> None:
    """Ten rounds have 320 steps of all devices or 2.4 s of steps, or too few steps for a rare stall."""
    run = measured(CAPTURED, *[step_seconds, step_seconds * 1.001] * 5, iterations=iterations)
    (sample,) = run.samples
    run = replace(run, samples=(replace(sample, seconds=tuple(of * devices for of in sample.seconds)),))
    (row,) = (
        row
        for row in judged(stored_estimates({"t": run}, {"t": run}, GPU, {}, {}))
        if "mean" in row.key.metric
    )
    assert (row.finding is Finding.NOT_WORSE) == clears


# --- the settings


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({}, Finding.WORSE),
        ({"margin": 0.012}, Finding.NOT_WORSE),
        ({"margin": 0.012, "tolerance": 0.0145}, Finding.UNDECIDED),
        ({"false_alarms": 1e-12, "tolerance": 0.0145}, Finding.UNDECIDED),
    ],
)
def test_settings_decide_a_slow_down(changed: dict[str, float], finding: Finding) -> None:
    """A step in a CUDA graph is slower by 1.4%, beside a peak memory that did not change."""
    settings = replace(GPU, metrics={}, **changed)  # type: ignore[arg-type]
    run = two_sides(CAPTURED, 1.014, 0.001, {"peak_memory_bytes": 1e9})
    estimates: list[Estimates] = []
    for stage in (Stage.FIRST, Stage.REPEAT):
        estimates += ab_estimates({"t": run}, {}, settings, stage)
    found = {row.key.metric: row.finding for row in judged(estimates, settings)}
    assert found["time"] is finding
    assert found["peak_memory_bytes"] is Finding.NOT_WORSE


@pytest.mark.parametrize(
    ("ratio", "noise", "again"), [(1.003, 0.001, True), (1.0012, 0.001, False), (1.006, 0.004, False)]
)
def test_small_change_of_a_precise_time_is_measured_again(ratio: float, noise: float, again: bool) -> None:
    """90% certainty is enough, because equal code rarely looks so much slower."""
    limits = replace(LIMITS, margin=GPU.margin)
    others = [replace(entry, limits=limits) for entry in equal(10)[2:]]
    first = estimate(1, ratio, noise=noise, limits=limits)
    row = row_of([first, *others])
    assert row.open == again
