"""Control measurements: a copy of memory, the base's own process sets, a delayed step, the base alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpperf.plugin.control_steps import measure_controls
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import CopySpec, EpochSpec, Spec, TrainingSpec
from ddpperf.verdict import controls
from ddpperf.verdict.estimates import Control, Estimates, Stage, ab_estimates
from tests.judged import GPU, control, equal, estimate, judged


def untrusted(*estimates: Estimates) -> list[str]:
    return [reason.text for reason in controls.untrusted(judged(estimates), estimates)]


def blind(*estimates: Estimates) -> list[str]:
    """Return what may have been missed, if these controls are beside usual ones and 8 equal pairs."""
    own = {entry.key for entry in estimates}
    usual = [control(Control.COPY), control(Control.DELAYED, 1.02)]
    every = [*estimates, *(entry for entry in usual if entry.key not in own), *equal(8)]
    return [reason.text for reason in controls.blind(judged(every))]


@pytest.mark.parametrize("kind", [Control.COPY, Control.HOST_COPY])
@pytest.mark.parametrize(("ratio", "fails"), [(1.0, False), (1.004, False), (1.03, True), (0.97, True)])
def test_copy_that_changed_makes_no_finding_count(kind: Control, ratio: float, fails: bool) -> None:
    found = untrusted(control(kind, ratio), *equal(8))
    assert bool(found) == fails
    assert all(text.startswith(f"the negative control failed: a {kind}, which no") for text in found)


def test_noisy_copy_may_hide_a_slow_down() -> None:
    noisy = control(Control.COPY, noise=0.03)
    assert untrusted(noisy, *equal(8)) == []
    (text,) = blind(noisy)
    assert text.startswith("the negative control is too noisy: a copy of memory takes 1.000 times")


@pytest.mark.parametrize(
    ("ratio", "noise", "fails"),
    [
        (1.02, 0.001, False),
        (1.02, 0.003, False),
        (1.01, 0.001, True),  # half of the delay is lost
        (1.02, 0.009, True),  # it is suspicious, but its interval does not exclude the margin
        (1.02, 0.012, True),
    ],
)
def test_delay_must_show_clearly(ratio: float, noise: float, fails: bool) -> None:
    found = blind(control(Control.DELAYED, ratio, noise=noise, sets=6))
    assert bool(found) == fails
    assert all(
        text.startswith("the positive control failed: a step that was delayed by 2%") for text in found
    )
    assert all(text.endswith("not at least 1.015 times") for text in found), "three quarters of the delay"


def test_base_that_is_faster_alone_is_reported() -> None:
    (text,) = blind(control(Control.BASE_ALONE, 1.5))
    assert text.startswith("a step of the base takes 1.50 times as long while the candidate's processes wait")
    assert blind(control(Control.BASE_ALONE, 0.9)) == []


@pytest.mark.parametrize(("slower", "differs"), [(0.0, False), (0.01, True), (-0.01, True)])
def test_one_slower_set_of_the_base_is_reported(slower: float, differs: bool) -> None:
    """A set of the candidate may then be slower, too, in all tests."""
    entries = [
        replace(entry, base=(entry.base[0] * (1 + slower), *entry.base[1:]))
        for number in range(1, 31)
        for entry in [estimate(number, noise=0.002 if number % 2 else -0.002)]
    ]
    found = untrusted(*entries)
    assert bool(found) == differs
    assert all(text.startswith("the base's process sets differ: one is ") for text in found)


# --- how they are measured

STEP = EpochSpec(world_size=1, per_rank_batch_size=8, strategy="single", epoch_images=8, execution="graph")


def run_of(spec: Spec, *seconds_by_set: float) -> Measured:
    samples = tuple(
        Sample(set=f"{'AB'[place % 2]}{place}", side="AB"[place % 2], torch="2.11", seconds=((seconds,),) * 4)
        for place, seconds in enumerate(seconds_by_set)
    )
    return Measured(spec=spec, iterations=1, samples=samples)


def measured_with(
    tests: dict[str, Measured], measure: Callable[..., Measured]
) -> tuple[Any, Sequence[Estimates]]:
    """Return the pool that measured the controls of these tests, and their estimates."""
    pool: Any = SimpleNamespace(
        measure=Mock(side_effect=measure), measure_base_alone=Mock(side_effect=lambda like: like.of("A"))
    )
    estimates = ab_estimates(tests, {}, GPU, Stage.FIRST)
    found, problems = measure_controls(pool, tests, estimates, GPU)
    assert problems == []
    return pool, found


def test_run_without_a_step_to_delay_is_reported() -> None:
    pool: Any = SimpleNamespace(measure=lambda spec: run_of(spec, 1.0, 1.0, 1.001, 1.001))
    found, (problem,) = measure_controls(pool, {}, [], GPU)
    assert {entry.key.control for entry in found} == {Control.COPY, Control.HOST_COPY}
    assert problem.text.startswith("the positive control was not measured: no test measures a step")


def test_delay_of_an_epoch_is_split_over_its_steps() -> None:
    epoch = replace(STEP, epoch_images=32)
    values = (1.0, 1.0, 1.001, 1.001, 1.0, 1.0)

    def measure(spec: Spec, candidate: Spec | None = None) -> Measured:
        slower = 1 + 4 * (candidate or spec).delay_seconds
        return run_of(spec, *(value * (slower if place % 2 else 1) for place, value in enumerate(values)))

    pool, _ = measured_with({"t": run_of(epoch, *values)}, measure)
    steps = [call.args[-1] for call in pool.measure.call_args_list]
    delays = [step.delay_seconds for step in steps if isinstance(step, EpochSpec)]
    assert delays == [pytest.approx(0.02 / 4, rel=0.01)]


def test_shortest_step_with_the_smallest_tolerance_is_delayed() -> None:
    """A shorter step outside of CUDA graphs has a larger tolerance."""
    graph = TrainingSpec(world_size=1, per_rank_batch_size=8, strategy="single", execution="graph")
    longer, eager = replace(graph, per_rank_batch_size=16), replace(graph, execution="eager")
    seconds = {longer: 3.0, graph: 2.0, eager: 1.0}
    values = (1.0, 1.001, 1.001, 1.002, 1.002, 1.003)

    def measure(spec: Spec, candidate: Spec | None = None) -> Measured:
        delay = candidate.delay_seconds if candidate is not None else 0.0
        usual = seconds.get(replace(spec, delay_seconds=0.0), 1.0)  # type: ignore[call-overload]
        return run_of(spec, *(usual * value + delay * (place % 2) for place, value in enumerate(values)))

    pool, _ = measured_with({spec.id: measure(spec) for spec in seconds}, measure)
    specs = [call.args[0] for call in pool.measure.call_args_list]
    assert [spec for spec in specs if not isinstance(spec, CopySpec)] == [graph]


@pytest.mark.parametrize(("hidden", "measured"), [(0, 1), (1, 3), (2, 5), (9, 5)])
def test_delay_that_does_not_show_is_measured_again(hidden: int, measured: int) -> None:
    """Another program slows the base in the first measurements of a delay. All of them count."""
    usual = (1.0, 1.001, 1.001, 1.002, 1.002, 1.003)
    times = 0

    def measure(spec: Spec, candidate: Spec | None = None) -> Measured:
        nonlocal times
        delay = candidate.delay_seconds if candidate is not None else 0.0
        times += delay > 0
        slower = 1 + delay * (1.0 if times > hidden else 0.7)
        return run_of(spec, *(value * (slower if place % 2 else 1) for place, value in enumerate(usual)))

    pool, found = measured_with({"t": run_of(STEP, *usual)}, measure)
    assert sum(not isinstance(call.args[0], CopySpec) for call in pool.measure.call_args_list) == measured
    delayed = next(entry for entry in found if entry.key.control is Control.DELAYED)
    assert len(delayed.candidate) == 3 * (measured + 1) // 2


def test_slow_sets_do_not_look_like_a_delay() -> None:
    """The ratio of the delayed step to the usual step is that of one process set."""
    usual = (1.0, 1.0, 1.5, 1.5, 1.0, 1.0)

    def measure(spec: Spec, candidate: Spec | None = None) -> Measured:
        if isinstance(spec, CopySpec):
            return run_of(spec, *usual)
        return run_of(spec, *(t * (1.02 if place % 2 else 1.0) for place, t in enumerate(usual)))

    _, found = measured_with({"t": run_of(STEP, *usual)}, measure)
    delayed = next(entry for entry in found if entry.key.control is Control.DELAYED)
    assert delayed.candidate == pytest.approx([1.02 * value for value in delayed.base])
