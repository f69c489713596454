"""The noise of a metric between process sets: its own, and that of its class.

One process set is one observation. All values are natural logs, so that a difference of 0.01 is 1%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SPREAD = 0.0005  # log ratio between process sets; the standard error of ten quiet rounds' median
MOST_PRIOR_FREEDOM = 8.0  # the largest weight of a class's variance, against a metric's own
OUTLIER_P = 0.01  # the level of the test for metrics far noisier than their class


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The variance of log values between process sets, with its degrees of freedom."""

    variance: float
    freedom: float


def pooled(groups: Sequence[Sequence[float]]) -> Noise:
    """Return the variance within groups of log values, of which at least one has two values."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(np.var(group)) * len(group) for group in groups)
    return Noise(variance=max(squares / freedom, LEAST_SPREAD**2), freedom=freedom)


def prior_of(noises: Sequence[Noise]) -> Noise:
    """Return the usual noise of a class of metrics, with its weight in degrees of freedom (Smyth 2004).

    The true variances of a class scatter as a scaled inverse chi-square. The weight d0 solves
    trigamma(d0 / 2) = var(ln s^2) - mean(trigamma(f / 2)), for the sample variances s^2 with f degrees of
    freedom. Where the variances differ by no more than chance explains, d0 is its largest value,
    `MOST_PRIOR_FREEDOM`. The usual variance is the median of the sample variances, each divided by
    the median of chi-square over its mean. A class with a single member has no weight.
    """
    from scipy.optimize import brentq
    from scipy.special import chdtri, digamma, polygamma

    variance, freedom = np.array([(noise.variance, noise.freedom) for noise in noises]).T
    usual = float(np.median(variance * freedom / chdtri(freedom, 0.5)))
    if len(noises) < 2:
        return Noise(variance=usual, freedom=0.0)
    logs = np.log(variance) - digamma(freedom / 2) + np.log(freedom / 2)
    scatter = float(np.var(logs, ddof=1) - np.mean(polygamma(1, freedom / 2)))
    most = min(MOST_PRIOR_FREEDOM, (len(noises) - 1) * float(np.median(freedom)))
    if scatter <= polygamma(1, most / 2):
        return Noise(variance=usual, freedom=most)
    weight = 2 * brentq(lambda half: polygamma(1, half) - scatter, 1e-3, most / 2)
    return Noise(variance=usual, freedom=float(weight))


def moderated(own: Noise, prior: Noise) -> Noise:
    """Return a metric's own noise shrunk towards the noise of its class (Smyth 2004).

    A metric far noisier than its class, by a chi-square test at level `OUTLIER_P`, keeps its own
    noise.
    """
    from scipy.special import chdtri

    if own.variance > prior.variance * chdtri(own.freedom, OUTLIER_P) / own.freedom:
        return own
    freedom = own.freedom + prior.freedom
    variance = (prior.freedom * prior.variance + own.freedom * own.variance) / freedom
    return Noise(variance=variance, freedom=freedom)
