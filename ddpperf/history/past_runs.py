"""Read the stored runs of a machine, oldest first, and the times that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.results.command_words import OF_COMPARISONS, command_words
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.stored_runs import (
    DAMAGED,
    Baseline,
    NoBaseline,
    Storage,
    is_ab_run,
    is_baseline,
    numbered,
    read_document,
    stem,
)
from ddpperf.specs import Spec

FIRST_RUNS = 5  # which a drift starts from
MOST_SHOWN = 60  # the newest runs of a history, and as many baselines; 60 files of 0.85 MB take 1.2 s
MOST_OF_DRIFT = 8  # the newest runs, and as many baselines, that the end of a drift is looked for in
Work = tuple[str, Spec]  # a test's id and what it measured: with both equal, times can be compared


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A stored run that is no A/B run. seconds: of a step, the median over the rounds.

    promoted: whether it is a baseline, or one of the first runs of a machine without baselines.
    accepted: whether it is a baseline, or was compared and could become one.
    """

    name: str
    when: str  # ISO 8601
    commit: str
    environment: Mapping[str, Any]
    promoted: bool
    accepted: bool
    options: str  # of its command line, those that say what is measured
    seconds: Mapping[Work, float]

    @property
    def day(self) -> str:
        return self.when[:10]


def past_runs(
    storage: Storage, newest: int = MOST_SHOWN, also: Sequence[Path] = ()
) -> tuple[list[PastRun], list[str]]:
    """Return the stored runs of this hardware, oldest first, and the names of damaged files.

    These are the first five baselines, and the `newest` last baselines and runs. A run that was
    promoted counts once. also: further files.
    """
    baselines, runs = numbered(storage.baselines), numbered(storage.runs)
    first = (baselines or runs)[:FIRST_RUNS]
    found: dict[tuple[str, tuple[float, ...]], PastRun] = {}
    damaged = []
    for path in dict.fromkeys([*first, *baselines[-newest:], *runs[-newest:], *also]):
        try:
            document = read_document(path)
            if is_ab_run(document["ddpperf"]):
                continue
            run = storage.read(document, path)
            compared = bool(document["ddpperf"].get("compared_with"))
            promoted = path in baselines or (path in first and is_baseline(document))
            one = PastRun(
                name=stem(path),
                when=run.when,
                commit=run.commit,
                environment=run.environment,
                promoted=promoted,
                accepted=promoted or path in also or (compared and is_baseline(document)),
                options=command_words(document["ddpperf"], tests=False, without=OF_COMPARISONS),
                seconds=_seconds(document["ddpperf"], run),
            )
        except (NoBaseline, *DAMAGED):
            damaged.append(path.name)
            continue
        if one.seconds:  # baselines come first, so the copy that was promoted is the one that counts
            found.setdefault((one.when, tuple(one.seconds.values())), one)
    return sorted(found.values(), key=lambda one: one.when), damaged


def _seconds(header: Mapping[str, Any], run: Baseline) -> dict[Work, float]:
    """Return the times of tests that passed, or only missed a threshold."""
    checks = header.get("thresholds", {}).get("checks", ())
    missed = {check["test"] for check in checks if not check["held"]}
    sound = {
        test
        for test, outcome in header["outcomes"].items()
        if outcome["kind"] == OutcomeKind.PASSED or test in missed
    }
    return {
        (test, one.spec): median(one.all_step_seconds())
        for test, one in run.measured.items()
        if test in sound
    }
