"""Find the first bad commit or version: git's bisect chooses which to try, and A/B measurements answer.

Good and bad are compared first. Their difference D is a log ratio of times. Each later comparison asks
whether good and the tried one differ by more than D/2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import expm1, hypot, sqrt
from statistics import mean

from ddpperf.analysis.statistics import t_quantile
from ddpperf.history.versions import Candidates, CannotMeasure
from ddpperf.machine.git import CHECKOUT_SECONDS, git
from ddpperf.verdict.noise import pooled

ALPHA = 0.01  # the probability of a wrong answer, in each direction
SETS, MOST_SETS = 3, 12  # process sets per side of a comparison: at first, and at most
WORDS = {True: "bad", False: "good", None: "skip"}  # of git bisect
Stage = tuple[Sequence[float], Sequence[float]]  # log seconds of the base's and the candidate's sets


@dataclass
class Comparisons:
    """All comparisons of a search. The noise between process sets is pooled over all of them.

    measure(base, candidate, sets): measures a pair that already has so many process sets per side, and
    returns its stages. May raise CannotMeasure.
    """

    measure: Callable[[str, str, int], list[Stage]]
    stages: dict[tuple[str, str], list[Stage]] = field(default_factory=dict)

    def sets(self, base: str, candidate: str) -> int:
        return sum(min(map(len, stage)) for stage in self.stages.get((base, candidate), []))

    def effect(self, base: str, candidate: str) -> tuple[float, float]:
        """Return the log ratio of a pair, and its standard error."""
        stages = self.stages[base, candidate]
        weights = [1 / (1 / len(before) + 1 / len(after)) for before, after in stages]
        changes = [mean(after) - mean(before) for before, after in stages]
        total = sum(weights)
        variance = pooled(self._groups()).variance
        return sum(w * c for w, c in zip(weights, changes, strict=True)) / total, sqrt(variance / total)

    @property
    def quantile(self) -> float:
        return t_quantile(ALPHA, pooled(self._groups()).freedom)

    def _groups(self) -> list[Sequence[float]]:
        return [side for stages in self.stages.values() for stage in stages for side in stage]

    def is_above(self, base: str, candidate: str, ends: tuple[str, str] | None = None) -> bool | None:
        """Return whether a pair differs by more than half of what `ends` differ by, or than 0 without ends.

        Measures until the answer is clear; returns None if it is not with MOST_SETS process sets.
        """
        while True:
            if sets := self.sets(base, candidate):
                change, error = self.effect(base, candidate)
                limit, of_limit = (value / 2 for value in self.effect(*ends)) if ends else (0.0, 0.0)
                if abs(change - limit) > self.quantile * hypot(error, of_limit):
                    return change > limit
                if sets >= MOST_SETS:
                    return None
            found = self.measure(base, candidate, sets)
            self.stages.setdefault((base, candidate), []).extend(found)

    def in_words(self, base: str, candidate: str) -> str:
        """Return the change of a pair with its interval of 98%."""
        change, error = self.effect(base, candidate)
        low, size, high = (f"{expm1(change + sign * self.quantile * error):+.1%}" for sign in (-1, 0, 1))
        return f"{size} ({low} to {high}, {self.sets(base, candidate)} process sets per side)"


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
            answer = comparisons.is_above(good, label(commit), (good, bad))
            found = comparisons.in_words(good, label(commit))
        except CannotMeasure as why:
            found = str(why)
        report(f"{WORDS[answer]:<5}{candidates.described(commit)}: {found}; {len(left)} were left")
        try:
            git(tree, "bisect", WORDS[answer], seconds=CHECKOUT_SECONDS)
        except OSError:
            ended = True  # only skipped commits are left
