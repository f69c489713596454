"""The losses and accuracies of a whole training by epoch, from a stored run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpperf.report.stored_cases import Case
from ddpperf.specs import RunSpec

BY_EPOCH = (
    *("train_loss", "train_accuracy", "test_loss", "test_accuracy"),
    *("train_seconds", "epoch_seconds", "skipped_steps"),
)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The figures of one epoch of a training with one random seed in one process set.

    figures: the stored ones of BY_EPOCH by name.
    """

    process_set: str
    seed: int
    epoch: int
    figures: Mapping[str, float]


def curve_points(case: Case) -> Iterator[CurvePoint]:
    """Yield the figures of each epoch of a case's training, for each random seed."""
    for measured in case.seeds:
        spec = measured.spec
        if not isinstance(spec, RunSpec):
            continue
        for sample in measured.samples:
            for epoch in range(1, spec.epochs + 1):
                stored = {name: sample.counters.get(f"{name}_{epoch}") for name in BY_EPOCH}
                # All ranks have the same losses and accuracies. Their seconds differ a little.
                figures = {name: max(ranks) for name, ranks in stored.items() if ranks}
                if figures:
                    yield CurvePoint(process_set=sample.set, seed=spec.seed, epoch=epoch, figures=figures)
