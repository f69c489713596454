"""The losses and accuracies of a whole training by epoch, from a stored run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpperf.report.stored_cases import Case
from ddpperf.specs import RunSpec

BY_EPOCH = (
    *("train_loss", "train_accuracy", "test_loss", "test_accuracy"),
    *("train_seconds", "epoch_seconds", "skipped_steps"),
)


def curve_points(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the stored figures of BY_EPOCH by name, for each epoch, random seed and process set."""
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
                    yield {"epoch": epoch, "seed": spec.seed, "process_set": sample.set} | figures
