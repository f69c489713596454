"""The noise between process sets: a metric's own, that of its class, and how much the class counts."""

from __future__ import annotations

import numpy as np
import pytest

from ddpperf.verdict.noise import LEAST_SPREAD, MOST_PRIOR_FREEDOM, Noise, moderated, pooled, prior_of

FREEDOM = 4.0  # of the sample variances: three process sets of each side


def drawn(scatter: float | None, members: int = 4000, variance: float = 1e-4) -> list[Noise]:
    """Return the sample variances of the members of a class, in an order that chance decides.

    scatter: the degrees of freedom of the scaled inverse chi-square of the true variances; None if equal.
    """
    rng = np.random.default_rng(9)
    true = variance * (1.0 if scatter is None else scatter / rng.chisquare(scatter, members))
    samples = true * rng.chisquare(FREEDOM, members) / FREEDOM
    return [Noise(variance=float(sample), freedom=FREEDOM) for sample in samples]


def test_variance_is_pooled_within_groups() -> None:
    """By hand: (0.02 + 0.08) / 2 for groups of two and two values, whose means do not matter."""
    found = pooled([[0.1, 0.3], [5.0, 5.4]])
    assert found.variance == pytest.approx((0.1**2 * 2 + 0.2**2 * 2) / 2)
    assert found.freedom == 2
    assert pooled([[1.0, 1.0], [2.0]]).variance == LEAST_SPREAD**2


@pytest.mark.parametrize("scatter", [1.0, 2.0, 4.0])
def test_weight_of_a_class_follows_its_scatter(scatter: float) -> None:
    """Where quiet and noisy metrics are mixed, a class says little about each of them."""
    assert prior_of(drawn(scatter)).freedom == pytest.approx(scatter, rel=0.1)


def test_class_of_equal_variances_has_the_largest_weight() -> None:
    found = prior_of(drawn(None))
    assert found.freedom == MOST_PRIOR_FREEDOM
    assert found.variance == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(("members", "weight"), [(1, 0.0), (2, 4.0), (3, 8.0), (9, MOST_PRIOR_FREEDOM)])
def test_small_class_has_at_most_the_freedom_of_the_others(members: int, weight: float) -> None:
    assert prior_of([Noise(variance=1e-4, freedom=FREEDOM)] * members).freedom == weight


def test_own_noise_is_shrunk_towards_the_class() -> None:
    """By hand: (8 * 1 + 4 * 2.5) / 12."""
    prior = Noise(variance=1.0, freedom=8.0)
    found = moderated(Noise(variance=2.5, freedom=4.0), prior)
    assert (found.variance, found.freedom) == pytest.approx((1.5, 12.0))
    quieter = moderated(Noise(variance=0.01, freedom=4.0), prior)
    assert quieter.variance == pytest.approx((8.0 + 0.04) / 12)


def test_far_noisier_metric_keeps_its_own_noise() -> None:
    """The upper 1% point of chi-square with 4 degrees of freedom is 13.28."""
    prior = Noise(variance=1.0, freedom=8.0)
    noisy, within = Noise(variance=13.29 / 4, freedom=4.0), Noise(variance=13.27 / 4, freedom=4.0)
    assert moderated(noisy, prior) == noisy
    assert moderated(within, prior).freedom == 12.0
