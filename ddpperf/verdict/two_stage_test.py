"""Whether metrics got worse between two sides: screened on a few process sets a side, decided on fresh ones.

The unit of replication is the process set. All values are natural logs of a set's estimate, turned so that greater is worse:
the log of seconds, minus the log of a bandwidth. A difference of 0.01 is 1 % worse.

Looks are two, and only two. The first screens each metric at `screen_alpha`; a suspect is measured again on fresh sets, and
they alone decide, at `suite_alpha` / (H `screen_alpha`) for H gated metrics. A metric whose true change is below the margin
is called worse only if both looks say so by chance, and by the union bound over H that happens in at most `suite_alpha` of all
suites, whatever else truly changed.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PRIOR_FREEDOM = 8  # how many degrees of freedom a noise class' variance counts beside a metric's own
POWER = 0.95  # with which a detectable change is found
OUTLIER_P = 0.01  # a metric that is so much noisier than its class stands alone
UNCHANGED_P = 0.025  # of each of the two one-sided tests
MOST_SETS = 64  # a side that are measured side by side


class Finding(enum.StrEnum):
    WORSE = "worse"
    UNCHANGED = "unchanged"
    BETTER = "better"
    UNDECIDED = "undecided"
    SUSPECT = "suspect"  # until it was measured again


@dataclass(frozen=True, kw_only=True)
class Settings:
    """margin: a change, as a log ratio, below which nobody cares. tolerance: within it a metric counts as unchanged.
    screen_sets, confirm_sets: process sets a side in the two looks."""

    margin: float
    tolerance: float
    screen_alpha: float
    screen_sets: int
    confirm_sets: int
    suite_alpha: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.margin < self.tolerance:
            raise ValueError(f"margin {self.margin} must be at least 0 and below tolerance {self.tolerance}")
        if not 0 < self.suite_alpha < self.screen_alpha < 0.5:
            raise ValueError(
                f"screen_alpha must lie between {self.suite_alpha} and 0.5, got {self.screen_alpha}"
            )
        if min(self.screen_sets, self.confirm_sets) < 2:
            raise ValueError(
                f"two process sets a side are the least, got {self.screen_sets} and {self.confirm_sets}"
            )

    def confirm_alpha(self, gated: int) -> float:
        """Of the second look, with `gated` metrics in the suite."""
        return min(self.screen_alpha, self.suite_alpha / (gated * self.screen_alpha))


GPU = Settings(margin=0.005, tolerance=0.02, screen_alpha=0.02, screen_sets=3, confirm_sets=6)
CPU = Settings(margin=0.01, tolerance=0.15, screen_alpha=0.05, screen_sets=3, confirm_sets=5)


@dataclass(frozen=True)
class Look:
    """base[metric, set] and candidate[metric, set], logs in which greater is worse, of equally many sets a side."""

    base: Array
    candidate: Array

    def __post_init__(self) -> None:
        if self.base.ndim != 2 or self.base.shape != self.candidate.shape or self.base.shape[1] < 2:
            raise ValueError(
                f"both sides need the same two sets or more, got {self.base.shape} and {self.candidate.shape}"
            )
        if not (np.isfinite(self.base).all() and np.isfinite(self.candidate).all()):
            raise ValueError(
                "a look holds a value that is no finite number; a metric without one is a hole, not a look"
            )

    @property
    def sets(self) -> int:
        return int(self.base.shape[1])

    @property
    def effect(self) -> Array:
        """By metric, how much worse the candidate is."""
        difference: Array = self.candidate.mean(axis=1) - self.base.mean(axis=1)
        return difference

    @property
    def variance(self) -> Array:
        """By metric, between the sets of one side, of both sides together."""
        pooled: Array = (self.base.var(axis=1, ddof=1) + self.candidate.var(axis=1, ddof=1)) / 2
        return pooled

    @property
    def freedom(self) -> int:
        return 2 * (self.sets - 1)


def class_variances(look: Look, classes: Sequence[Hashable], floor: float) -> Array:
    """By metric, the variance that is usual in its noise class: the median, raised to the mean that a chi-square of that median
    has; at least `floor`, what a quiet metric was seen to have."""
    from scipy.stats import chi2  # here: it takes most of a second, and few commands need it

    median_over_mean = chi2.median(look.freedom) / look.freedom
    usual = np.empty(len(classes))
    for name in set(classes):
        members = np.array([each == name for each in classes])
        usual[members] = max(float(np.median(look.variance[members])) / median_over_mean, floor)
    return usual


@dataclass(frozen=True)
class Noise:
    """variance[metric] between sets of a side, and its degrees of freedom."""

    variance: Array
    freedom: Array

    def error(self, sets: int) -> Array:
        """Standard error of an effect, of `sets` sets a side."""
        error: Array = np.sqrt(self.variance * 2 / sets)
        return error


def prior_freedom(look: Look, classes: Sequence[Hashable]) -> Array:
    """By metric, the degrees of freedom that its class' variance is worth: at most those that the other members have."""
    others = np.array([classes.count(name) - 1 for name in classes], dtype=float)
    freedom: Array = np.minimum(PRIOR_FREEDOM, others * look.freedom)
    return freedom


def noise(look: Look, usual: Array, prior: Array | float, floor: float) -> Noise:
    """What a look's own variances say together with those that are usual: Smyth's moderated variance, with a guard.

    A metric far noisier than its class, by a chi-square test at `OUTLIER_P`, has its own variance alone, and fewer degrees of
    freedom. prior: those of the usual variances. floor: the least variance.
    """
    from scipy.stats import chi2

    own = np.maximum(look.variance, floor)
    together = (prior * usual + look.freedom * own) / (prior + look.freedom)
    alone = own > usual * chi2.isf(OUTLIER_P, look.freedom) / look.freedom
    return Noise(
        np.where(alone, own, together), np.where(alone, look.freedom, prior + look.freedom).astype(float)
    )


def critical(alpha: float, freedom: Array) -> Array:
    """Student's t that chance exceeds with probability alpha."""
    from scipy.stats import t

    quantile: Array = t.isf(alpha, freedom)
    return quantile


def screen(look: Look, noise: Noise, settings: Settings, gated: int) -> list[Finding]:
    """The first look: what it can say for good, and which metrics are suspects."""
    error = noise.error(look.sets)
    suspect = look.effect - critical(settings.screen_alpha, noise.freedom) * error > settings.margin
    better = look.effect + critical(settings.suite_alpha / gated, noise.freedom) * error < -settings.margin
    unchanged = np.abs(look.effect) + critical(UNCHANGED_P, noise.freedom) * error < settings.tolerance
    return _named((suspect, Finding.SUSPECT), (better, Finding.BETTER), (unchanged, Finding.UNCHANGED))


def confirm(look: Look, noise: Noise, settings: Settings, gated: int) -> list[Finding]:
    """The second look at suspects, on fresh sets, which alone decide; `gated` counts all metrics of the suite."""
    error = noise.error(look.sets)
    worse = look.effect - critical(settings.confirm_alpha(gated), noise.freedom) * error > settings.margin
    unchanged = np.abs(look.effect) + critical(UNCHANGED_P, noise.freedom) * error < settings.tolerance
    return _named((worse, Finding.WORSE), (unchanged, Finding.UNCHANGED))


def untouched_findings(look: Look, noise: Noise, settings: Settings) -> list[Finding]:
    """Of what no change can touch: whether it seems to have changed all the same, with probability `suite_alpha` by chance."""
    error = noise.error(look.sets)
    beyond = critical(settings.suite_alpha / 2, noise.freedom) * error + settings.margin
    unchanged = np.abs(look.effect) + critical(UNCHANGED_P, noise.freedom) * error < settings.tolerance
    worse, better = look.effect > beyond, look.effect < -beyond
    return _named((worse, Finding.WORSE), (better, Finding.BETTER), (unchanged, Finding.UNCHANGED))


def _named(*answers: tuple[npt.NDArray[np.bool_], Finding]) -> list[Finding]:
    """By metric the first answer that holds, else undecided."""
    conditions, names = zip(*answers, strict=True)
    return [
        next((name for held, name in zip(each, names, strict=True) if held), Finding.UNDECIDED)
        for each in zip(*conditions, strict=True)
    ]


def minimum_detectable_effect(
    noise: Noise, settings: Settings, gated: int, *, screened: bool = True
) -> Array:
    """By metric, the least change, as a log ratio, that both looks together call worse with probability of about POWER.
    screened: whether there is a first look at all."""
    first, second = _reach(noise, settings, gated)
    confirmed = second * noise.error(settings.confirm_sets)
    effect: Array = (
        np.maximum(first * noise.error(settings.screen_sets), confirmed) if screened else confirmed
    )
    return settings.margin + effect


def sets_needed(noise: Noise, settings: Settings, gated: int, *, screened: bool = True) -> Array:
    """By metric, the fewest sets a side in both looks with which a change of the tolerance would be called worse, 2 or more."""
    first, second = _reach(noise, settings, gated)
    reach = np.maximum(first, second) if screened else second
    sets: Array = np.ceil(2 * noise.variance * (reach / (settings.tolerance - settings.margin)) ** 2)
    return np.maximum(sets, 2)


def _reach(noise: Noise, settings: Settings, gated: int) -> tuple[Array, Array]:
    """By look and metric, how many standard errors above the margin an effect must be."""
    from scipy.stats import norm

    alphas = settings.screen_alpha, settings.confirm_alpha(gated)
    first, second = (critical(alpha, noise.freedom) + norm.isf(1 - POWER) for alpha in alphas)
    return first, second
