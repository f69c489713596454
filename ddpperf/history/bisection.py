"""Find the first bad commit or version: git's bisect chooses which to try, and A/B measurements answer.

Good and bad are compared first. Their difference D is a log ratio of times. Each later comparison asks
whether good and the tried one differ by more than D/2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import expm1, hypot, sqrt
from statistics import fmean, mean

from ddpperf.analysis.statistics import t_quantile
from ddpperf.history.versions import Candidates, CannotMeasure
from ddpperf.machine.git import CHECKOUT_SECONDS, git
from ddpperf.verdict.noise import pooled

ALPHA = 0.01  # the probability of a wrong answer, in each direction
SETS, MOST_SETS = 3, 12  # process sets per side of a comparison: at first, and at most
WORDS = {True: "bad", False: "good", None: "skip"}  # of git bisect
Pair = tuple[str, str]  # base and candidate
Stage = tuple[Sequence[float], Sequence[float]]  # log seconds of the base's and the candidate's sets


@dataclass
class Comparisons:
    """All comparisons of a search. The noise between process sets is pooled over all of them.

    measure(base, candidate, sets): measures a pair that already has so many process sets per side, and
    returns its stages. May raise CannotMeasure.
    """

    measure: Callable[[str, str, int], list[Stage]]
    stages: dict[Pair, list[Stage]] = field(default_factory=dict)

    def sets(self, pair: Pair) -> int:
        return sum(min(map(len, stage)) for stage in self.stages.get(pair, []))

    def effect(self, pair: Pair) -> tuple[float, float]:
        """Return the log ratio of a pair, and half the width of its interval of 98%."""
        groups = [side for stages in self.stages.values() for stage in stages for side in stage]
        noise, stages = pooled(groups), self.stages[pair]
        weights = [1 / (1 / len(base) + 1 / len(candidate)) for base, candidate in stages]
        changes = [mean(candidate) - mean(base) for base, candidate in stages]
        error = sqrt(noise.variance / sum(weights))
        return fmean(changes, weights), t_quantile(ALPHA, noise.freedom) * error

    def is_above(self, pair: Pair, ends: Pair | None = None) -> bool | None:
        """Return whether a pair differs by more than half of what `ends` differ by, or than 0 without ends.

        Measures until the answer is clear; returns None if it is not with MOST_SETS process sets.
        """
        while True:
            if sets := self.sets(pair):
                change, error = self.effect(pair)
                limit, of_limit = (value / 2 for value in self.effect(ends)) if ends else (0.0, 0.0)
                if abs(change - limit) > hypot(error, of_limit):
                    return change > limit
                if sets >= MOST_SETS:
                    return None
            self.stages.setdefault(pair, []).extend(self.measure(*pair, sets))

    def in_words(self, pair: Pair) -> str:
        """Return the change of a pair with its interval of 98%."""
        change, error = self.effect(pair)
        low, size, high = (f"{expm1(end):+.1%}" for end in (change - error, change, change + error))
        return f"{size} ({low} to {high}, {self.sets(pair)} process sets per side)"


def first_bad(candidates: Candidates, comparisons: Comparisons, report: Callable[[str], None]) -> list[str]:
    """Return the first bad commit, or those of which one is the first if others cannot be measured.

    report: called with a line for each step.
    """
    tree, label = candidates.tree, candidates.label
    good, bad = map(label, candidates.ends)
    git(tree, "bisect", "start", *reversed(candidates.ends), seconds=CHECKOUT_SECONDS)
    ended = False
    while True:
        left = git(tree, "rev-list", "refs/bisect/bad", "--not", "--glob=refs/bisect/good-*").split()
        if len(left) == 1 or ended:
            return left
        commit, answer = git(tree, "rev-parse", "HEAD"), None
        try:
            answer = comparisons.is_above((good, label(commit)), (good, bad))
            found = comparisons.in_words((good, label(commit)))
        except CannotMeasure as why:
            found = str(why)
        report(f"{WORDS[answer]:<5}{candidates.described(commit)}: {found}; it was one of {len(left)}")
        try:
            git(tree, "bisect", WORDS[answer], seconds=CHECKOUT_SECONDS)
        except OSError:
            ended = True  # only skipped commits are left
