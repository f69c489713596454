"""The statistical tests of an A/B run: screening on few process sets, then later measurements.

One process set is one observation. All values are natural logs of the estimate from one process
set: log seconds, or minus log bandwidth, so that greater is worse. A difference of 0.01 is 1%.

Screening tests each metric at level `screen_alpha`. A suspected regression is measured again on new
process sets, up to `LOOKS` times (each is a look), and only the new process sets decide. A test that
is undecided after the screening is measured again, and all its process sets decide.

The error probability of the suite, `suite_alpha`, is spent over these tests as group sequential
designs do (Lan and DeMets 1983), here by the union bound. For H gated metrics, one half is for
suspected regressions: level `suite_alpha` / 2 / (H `screen_alpha` `LOOKS`) in each look. The other
half is for all metrics: level `suite_alpha` / 2 / (H (`LOOKS` + 1)) in each look, and in the
screening of a run that confirms a comparison with a stored run. So a metric whose true change is
below the margin is called worse in at most `suite_alpha` of all suites, whatever else truly changed.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PRIOR_DEGREES_OF_FREEDOM = 8  # the weight of a noise class's variance, against a metric's own
POWER = 0.95  # the probability with which a detectable change is found
OUTLIER_P = 0.01  # the level of the test for metrics far noisier than their class
LOOKS = 2  # how often a test is measured again, at most
UNCHANGED_P = 0.025  # the level of each of the two one-sided tests for "unchanged", in one look
MOST_SETS = 64  # the most process sets of each of base and candidate in one run


class Finding(enum.StrEnum):
    """The result of testing one metric for a change between base and candidate."""

    WORSE = "worse"
    UNCHANGED = "unchanged"
    BETTER = "better"
    UNDECIDED = "undecided"
    SUSPECT = "suspect"  # worse in the screening, to be measured again


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers that decide whether a metric changed between base and candidate.

    Changes below the log ratio `margin` do not matter. A change within the log ratio `tolerance`
    counts as unchanged. `screen_sets` and `confirm_sets` are the process sets of each of base and
    candidate in the screening and in each repeated measurement. `screen_alpha` is the error
    probability of the screening for each metric, and `suite_alpha` that of the whole suite.
    """

    margin: float
    tolerance: float
    screen_alpha: float
    screen_sets: int
    confirm_sets: int
    suite_alpha: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.margin < self.tolerance:
            raise ValueError(f"margin {self.margin} must be at least 0 and below tolerance {self.tolerance}")
        if not 0 < (least := self.suite_alpha) < self.screen_alpha < 0.5:
            raise ValueError(f"screen_alpha must lie between {least} and 0.5, got {self.screen_alpha}")

    def look_alpha(self, gated: int, *, suspect: bool) -> float:
        """Return the significance level of each repeated test of one metric, if a suite has `gated` metrics.

        `suspect` says whether the screening found the metric worse.
        """
        level = self.suite_alpha / 2 / gated
        if not suspect:
            return level / (LOOKS + 1)  # the screening may decide, too
        return min(self.screen_alpha, level / LOOKS / self.screen_alpha)


GPU = Settings(margin=0.005, tolerance=0.02, screen_alpha=0.02, screen_sets=3, confirm_sets=6)
CPU = Settings(margin=0.01, tolerance=0.15, screen_alpha=0.05, screen_sets=3, confirm_sets=5)


@dataclass(frozen=True)
class LogEstimates:
    """Natural logs of a metric's estimates in base and candidate; greater is worse.

    The shapes are `base[metric, set]` and `candidate[metric, set]`.
    """

    base: Array
    candidate: Array

    @property
    def sets(self) -> int:
        """The number of process sets per side, which is equal for base and candidate."""
        return int(self.base.shape[1])

    @property
    def effect(self) -> Array:
        """The log ratio of candidate to base for each metric; positive is worse."""
        difference: Array = self.candidate.mean(axis=1) - self.base.mean(axis=1)
        return difference

    @property
    def variance(self) -> Array:
        """The variance between process sets for each metric, pooled over base and candidate."""
        pooled: Array = (self.base.var(axis=1, ddof=1) + self.candidate.var(axis=1, ddof=1)) / 2
        return pooled

    @property
    def degrees_of_freedom(self) -> int:
        """The degrees of freedom of the pooled variance between process sets."""
        return 2 * (self.sets - 1)


@dataclass(frozen=True)
class Noise:
    """The variance between process sets for each metric, with its degrees of freedom."""

    variance: Array
    degrees_of_freedom: Array

    def standard_error(self, sets: int) -> Array:
        """Return the standard error of log(candidate / base) from `sets` process sets each."""
        error: Array = np.sqrt(self.variance * 2 / sets)
        return error

    def quantile(self, alpha: float) -> Array:
        """Return the value that Student's t exceeds with probability `alpha`, for each metric."""
        from scipy.stats import t  # imported here because it takes 0.5 s

        quantile: Array = t.isf(alpha, self.degrees_of_freedom)
        return quantile


def class_noise(estimates: LogEstimates, classes: Sequence[Hashable], floor: float) -> Noise:
    """Return the usual noise of each metric, estimated from all metrics of the same class.

    The variance is the median variance in the class, divided by the median of chi-square over its
    mean, and at least `floor`. Its degrees of freedom are those of the other members together, at
    most `PRIOR_DEGREES_OF_FREEDOM`.
    """
    from scipy.stats import chi2

    freedom = estimates.degrees_of_freedom
    variance = np.empty(len(classes))
    for name in set(classes):
        members = np.array([other == name for other in classes])
        unbiased = float(np.median(estimates.variance[members])) * freedom / chi2.median(freedom)
        variance[members] = max(unbiased, floor)
    others = np.array([classes.count(name) - 1 for name in classes], dtype=float)
    return Noise(variance, np.minimum(PRIOR_DEGREES_OF_FREEDOM, others * freedom))


def moderated_noise(
    estimates: LogEstimates, prior: Noise, floor: float, shrunk_always: Mask | bool = False
) -> Noise:
    """Return each metric's own variance shrunk towards a prior variance (Smyth 2004).

    A metric far noisier than its class, by a chi-square test at level `OUTLIER_P`, keeps its own
    variance, with fewer degrees of freedom. The metrics in `shrunk_always` are shrunk even then. No
    variance is below `floor`.
    """
    from scipy.stats import chi2

    freedom = estimates.degrees_of_freedom
    own = np.maximum(estimates.variance, floor)
    together = prior.degrees_of_freedom + freedom
    shrunk = (prior.degrees_of_freedom * prior.variance + freedom * own) / together
    outlier = own > prior.variance * chi2.isf(OUTLIER_P, freedom) / freedom
    outlier &= np.logical_not(shrunk_always)
    return Noise(np.where(outlier, own, shrunk), np.where(outlier, freedom, together).astype(float))


def screen(
    estimates: LogEstimates, noise: Noise, settings: Settings, gated: int, *, decides: bool = False
) -> list[Finding]:
    """Return each metric's finding from the screening, such as suspect or unchanged.

    `gated` is the number of metrics of the suite whose worsening fails the run. `decides` says
    whether the screening may call a metric worse, at the level of a repeated test, not only suspect.
    """
    levels = {Finding.WORSE: settings.look_alpha(gated, suspect=False)} if decides else {}
    levels |= {Finding.SUSPECT: settings.screen_alpha, Finding.BETTER: settings.suite_alpha / gated}
    return _findings(estimates, noise, settings, levels)


def look(
    estimates: LogEstimates, noise: Noise, settings: Settings, gated: int, *, suspect: bool
) -> list[Finding]:
    """Return the finding for each metric that was measured again.

    `estimates` are those of the new process sets for suspected regressions, and of all process sets
    for undecided metrics. `gated` is the number of metrics of the suite whose worsening fails the
    run.
    """
    levels = {Finding.WORSE: settings.look_alpha(gated, suspect=suspect)}
    return _findings(estimates, noise, settings, levels)


def negative_control_findings(estimates: LogEstimates, noise: Noise, settings: Settings) -> list[Finding]:
    """Return the findings for negative controls, from a two-sided t test at level `suite_alpha`."""
    alpha = settings.suite_alpha / 2
    return _findings(estimates, noise, settings, {Finding.WORSE: alpha, Finding.BETTER: alpha})


def _findings(
    estimates: LogEstimates, noise: Noise, settings: Settings, levels: Mapping[Finding, float]
) -> list[Finding]:
    """Return the first finding of `levels` that is significant, else unchanged or undecided.

    The last is "unchanged" if two one-sided tests find the change within the tolerance.
    """
    error = noise.standard_error(estimates.sets)
    conditions: dict[Finding, Mask] = {}
    for finding, alpha in levels.items():
        growth = -estimates.effect if finding is Finding.BETTER else estimates.effect
        conditions[finding] = growth - noise.quantile(alpha) * error > settings.margin
    half_width = noise.quantile(UNCHANGED_P) * error
    conditions[Finding.UNCHANGED] = np.abs(estimates.effect) + half_width < settings.tolerance
    found = np.select(list(conditions.values()), list(conditions), default=Finding.UNDECIDED)
    return list(map(Finding, found))


def detection(noise: Noise, settings: Settings, gated: int, sets: int | None = None) -> tuple[Array, Array]:
    """Return the smallest detected worsening of each metric, and the process sets that are needed.

    The worsening is the log ratio that is detected with probability `POWER`, which is approximate
    and counts the screening and the last repeated test. The number of process sets is that of each
    of base and candidate, at least 2, with which a change as large as the tolerance is detected.
    `sets` is the number of process sets of metrics that the screening did not suspect, so that one
    test at a strict level decides.
    """
    from scipy.stats import norm

    if sets is None:
        stages = [(settings.look_alpha(gated, suspect=True), LOOKS * settings.confirm_sets)]
        stages += [(settings.screen_alpha, settings.screen_sets)]
    else:
        stages = [(settings.look_alpha(gated, suspect=False), sets)]
    distances = [noise.quantile(alpha) + norm.ppf(POWER) for alpha, _ in stages]  # in standard errors
    errors = [noise.standard_error(of_stage) for _, of_stage in stages]
    effect = settings.margin + np.max(np.multiply(distances, errors), axis=0)
    needed = np.max(distances, axis=0) / (settings.tolerance - settings.margin)
    return effect, np.maximum(np.ceil(2 * noise.variance * needed**2), 2)
