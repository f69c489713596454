"""The statistics of screening and confirmation: invariances, bounds and power."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from ddpperf.verdict.two_stage_test import (
    CPU,
    GPU,
    LOOKS,
    PRIOR_DEGREES_OF_FREEDOM,
    Array,
    Finding,
    LogEstimates,
    Noise,
    Settings,
    class_noise,
    detection,
    look,
    moderated_noise,
    screen,
)
from tests.generated import BOUNDED

FLOOR = 0.0005**2
ORDER = [Finding.BETTER, Finding.UNCHANGED, Finding.UNDECIDED, Finding.SUSPECT]

logs = st.floats(-0.2, 0.2, allow_subnormal=False)


@st.composite
def measured_looks(draw: st.DrawFn) -> LogEstimates:
    metrics, sets = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    sides = st.lists(st.lists(logs, min_size=sets, max_size=sets), min_size=metrics, max_size=metrics)
    return LogEstimates(np.array(draw(sides)), np.array(draw(sides)))


def of(base: Array | list[float], candidate: Array | list[float]) -> LogEstimates:
    return LogEstimates(np.array([base]), np.array([candidate]))


def noise_of(variance: float, freedom: float = 12) -> Noise:
    return Noise(np.array([variance]), np.array([freedom]))


@given(measured_looks())
@BOUNDED
def test_swapped_sides_negate_the_effect(one: LogEstimates) -> None:
    swapped = LogEstimates(one.candidate, one.base)
    assert swapped.effect == pytest.approx(-one.effect)
    assert swapped.variance == pytest.approx(one.variance)


@given(measured_looks(), st.floats(-3, 3), st.floats(-0.5, 0.5), st.randoms())
@BOUNDED
def test_units_and_order_do_not_matter(one: LogEstimates, unit: float, shift: float, chance: Any) -> None:
    """A factor is a constant added to a log."""
    order = chance.sample(range(one.sets), one.sets)
    moved = LogEstimates(one.base[:, order] + unit, one.candidate + unit + shift)
    assert moved.effect == pytest.approx(one.effect + shift)
    assert moved.variance == pytest.approx(one.variance, abs=1e-12)


@given(measured_looks(), st.floats(0, 0.3), st.integers(1, 1000))
@BOUNDED
def test_a_worse_candidate_never_gets_a_better_answer(one: LogEstimates, shift: float, gated: int) -> None:
    classes = ["one"] * len(one.base)
    found = []
    for each in (one, LogEstimates(one.base, one.candidate + shift)):
        spread = moderated_noise(each, class_noise(each, classes, FLOOR), 0.0)
        found.append([ORDER.index(every) for every in screen(each, spread, GPU, gated)])
    unchanged, undecided = ORDER.index(Finding.UNCHANGED), ORDER.index(Finding.UNDECIDED)
    for before, after in zip(*found, strict=True):
        assert after >= before or (before, after) == (undecided, unchanged), (
            "an undecided gain may shrink to no change"
        )


@given(measured_looks(), st.integers(1, 500), st.integers(1, 500))
@BOUNDED
def test_a_larger_suite_never_finds_more(one: LogEstimates, gated: int, more: int) -> None:
    spread = moderated_noise(one, class_noise(one, ["one"] * len(one.base), FLOOR), 0.0)
    few, many = (look(one, spread, GPU, count, suspect=True) for count in (gated, gated + more))
    assert {i for i, found in enumerate(many) if found is Finding.WORSE} <= {
        i for i, found in enumerate(few) if found is Finding.WORSE
    }


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"margin": 0.02}, r"margin 0\.02 must be at least 0 and below tolerance 0\.02"),
        ({"margin": -0.1}, r"margin -0\.1 must be at least 0"),
        ({"screen_alpha": 0.01}, r"screen_alpha must lie between 0\.01 and 0\.5, got 0\.01"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], what: str) -> None:
    values: dict[str, Any] = {
        "margin": 0.005, "tolerance": 0.02, "screen_alpha": 0.02, "screen_sets": 3, "confirm_sets": 6,
    }  # fmt: skip
    with pytest.raises(ValueError, match=what):
        Settings(**values | fields)


@pytest.mark.parametrize("settings", [GPU, CPU])
@pytest.mark.parametrize("gated", [12, 240])
def test_levels_add_up_to_suite_alpha(settings: Settings, gated: int) -> None:
    """By the union bound over all metrics and looks, of suspects and of undecided tests."""
    suspect, undecided = (settings.look_alpha(gated, suspect=kind) for kind in (True, False))
    spent = gated * (LOOKS * settings.screen_alpha * suspect + (LOOKS + 1) * undecided)
    assert spent == pytest.approx(settings.suite_alpha)


def test_look_is_never_laxer_than_screening() -> None:
    assert GPU.look_alpha(1, suspect=True) == GPU.screen_alpha


def test_each_finding_has_its_bound() -> None:
    """With a known variance: the bounds are Student's, one-sided, on an error of both sides' sets."""
    sets, freedom, gated = 3, 12, 10
    error = 0.003 * math.sqrt(2 / sets)
    suspected = GPU.margin + t.isf(GPU.screen_alpha, freedom) * error
    better = -GPU.margin - t.isf(GPU.suite_alpha / gated, freedom) * error
    unchanged = 0.05 - t.isf(0.025, freedom) * error
    wide = replace(GPU, tolerance=0.05)  # so that the bounds do not overlap
    for effect, found in (
        (suspected + 1e-6, Finding.SUSPECT),
        (suspected - 1e-6, Finding.UNCHANGED),
        (better - 1e-6, Finding.BETTER),
        (better + 1e-6, Finding.UNCHANGED),
    ):
        assert screen(of([0.0] * sets, [effect] * sets), noise_of(0.003**2), wide, gated) == [found], effect
    assert unchanged > suspected
    narrow = replace(GPU, tolerance=0.01)
    assert screen(of([0.0] * sets, [0.009] * sets), noise_of(0.003**2), narrow, gated) == [Finding.UNDECIDED]
    error = 0.003 * math.sqrt(2 / 6)
    for settings, suspect in ((wide, True), (GPU, True), (wide, False), (GPU, False)):
        worse = GPU.margin + t.isf(GPU.look_alpha(gated, suspect=suspect), freedom) * error
        same = settings.tolerance - t.isf(0.025, freedom) * error
        otherwise = Finding.UNCHANGED if worse < same else Finding.UNDECIDED
        for change, found in ((1e-6, Finding.WORSE), (-1e-6, otherwise)):
            estimates = of([0.0] * 6, [worse + change] * 6)
            assert look(estimates, noise_of(0.003**2), settings, gated, suspect=suspect) == [found]


def test_worse_goes_before_unchanged() -> None:
    """A change of 1 %, seen sharply, is above the margin and within the tolerance."""
    sharp = noise_of(1e-12)
    assert look(of([0.0] * 6, [0.01] * 6), sharp, GPU, 10, suspect=True) == [Finding.WORSE]
    assert look(of([0.0] * 6, [0.004] * 6), sharp, GPU, 10, suspect=True) == [Finding.UNCHANGED]


def test_noise_is_shrunk_except_for_outliers() -> None:
    rng = np.random.default_rng(0)
    sigma = np.where(np.arange(400) < 20, 0.1, 0.003)[:, None]
    one = LogEstimates(rng.normal(size=(400, 3)) * sigma, rng.normal(size=(400, 3)) * sigma)
    usual = class_noise(one, ["gpu"] * 400, FLOOR)
    assert usual.variance[0] ** 0.5 == pytest.approx(0.003, rel=0.15)
    spread = moderated_noise(one, usual, 0.0)
    noisy = spread.degrees_of_freedom[:20] == 4
    assert noisy.mean() > 0.9
    assert spread.variance[:20][noisy] == pytest.approx(one.variance[:20][noisy])
    assert np.mean(spread.degrees_of_freedom[20:] == PRIOR_DEGREES_OF_FREEDOM + 4) > 0.97
    assert spread.variance[20:].std() < one.variance[20:].std()
    always = moderated_noise(one, usual, 0.0, np.arange(400) < 10)
    assert np.all(always.degrees_of_freedom[:10] == PRIOR_DEGREES_OF_FREEDOM + 4)
    assert always.degrees_of_freedom[10:] == pytest.approx(spread.degrees_of_freedom[10:])
    both = class_noise(one, ["noisy"] * 20 + ["gpu"] * 380, FLOOR).variance
    assert both[0] > 100 * both[-1], "each class by itself"
    still = LogEstimates(np.zeros((2, 3)), np.zeros((2, 3)))
    assert class_noise(still, ["a", "a"], FLOOR).variance == pytest.approx(FLOOR), (
        "nothing is quieter than calibrated"
    )


@pytest.mark.parametrize(("settings", "least", "most"), [(GPU, 0.012, 0.025), (CPU, 0.012, 0.05)])
def test_detectable_effect_is_found_with_its_power(settings: Settings, least: float, most: float) -> None:
    """Simulated with the variance known: about the stated power, of screening and last look together."""
    rng, trials, spread = np.random.default_rng(1), 4000, noise_of(0.003**2, 1e6)
    effect = float(detection(spread, settings, 240)[0][0])
    assert least < effect < most
    many = Noise(np.full(trials, 0.003**2), np.full(trials, 1e6))

    def drawn(sets: int) -> LogEstimates:
        return LogEstimates(
            rng.normal(size=(trials, sets)) * 0.003, effect + rng.normal(size=(trials, sets)) * 0.003
        )

    first = screen(drawn(settings.screen_sets), many, settings, 240)
    second = look(drawn(LOOKS * settings.confirm_sets), many, settings, 240, suspect=True)
    found = np.mean(
        [one is Finding.SUSPECT and two is Finding.WORSE for one, two in zip(first, second, strict=True)]
    )
    assert 0.9 <= found <= 0.99


def test_undecided_reach_depends_on_all_sets() -> None:
    """More of them find less, and as many as are advised find a change of the tolerance."""
    spread = noise_of(0.0055**2, 30)

    def detectable(sets: int) -> float:
        return float(detection(spread, GPU, 4000, sets)[0][0])

    assert detectable(40) == pytest.approx(GPU.margin + (detectable(6) - GPU.margin) * math.sqrt(6 / 40))
    needed = int(detection(spread, GPU, 4000, 6)[1][0])
    assert needed > 6
    assert detectable(needed) <= GPU.tolerance


def test_stricter_level_makes_undecided_reach_wider() -> None:
    """One test at a strict level decides undecided metrics, a screening and a laxer one suspects."""
    spread = noise_of(0.003**2, 30)
    sets = LOOKS * GPU.confirm_sets
    enough = replace(GPU, screen_sets=sets)
    assert float(detection(spread, GPU, 240, sets)[0][0]) > float(detection(spread, enough, 240)[0][0])
