"""Losses, accuracies and costs of whole trainings in a report's tables, from stored counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from scipy import stats

from tests.stored_samples import Figures, Measured, Rows


def by_epoch(m: Measured, name: str) -> list[float]:
    return [fmean(m.of(f"{name}_{epoch + 1}")) for epoch in range(m.spec["epochs"])]


def last(runs: Sequence[Measured], name: str = "test_accuracy") -> list[float]:
    return [by_epoch(m, name)[-1] for m in runs]


def over(m: Measured, begin: str, *, swapped: bool = False) -> list[float] | None:
    """Return the points of accuracy over another training, with Welch's interval for several seeds."""
    runs, others = [m, *m.named("seed=")], m.named(begin)
    if not others:
        return None
    pair = [np.array(last(found)) for found in ((others, runs) if swapped else (runs, others))]
    difference = pair[0].mean() - pair[1].mean()
    if len(runs) == 1:
        return [100 * difference]
    errors = [values.var(ddof=1) / len(values) for values in pair]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(values) - 1) for e, values in zip(errors, pair, strict=True))
    half = stats.t.ppf(0.975, freedom) * sum(errors) ** 0.5
    return [100 * difference, max(-100, 100 * (difference - half)), min(100, 100 * (difference + half))]


def trained(m: Measured) -> Figures:
    runs = [m, *m.named("seed=")]
    seconds = (
        sum(max(one.of(f"train_seconds_{epoch + 1}")) for epoch in range(m.spec["epochs"])) for one in runs
    )
    time = fmean(seconds)
    known: Figures = {"time": time, "seeds": len(runs)}
    if m.spec["data"] == "synthetic":
        return known
    found: Figures = {
        name.replace("_", " "): fmean(last(runs, name)) for name in ("train_loss", "train_accuracy")
    }
    accuracies = last(runs)
    ends = [fmean(accuracies)]
    if len(runs) > 1:
        half = stats.t.ppf(0.975, len(runs) - 1) * np.std(accuracies, ddof=1) / len(runs) ** 0.5
        ends += [max(0, ends[0] - half), min(1, ends[0] + half)]
    best = fmean(max(by_epoch(one, "test_accuracy")) for one in runs)
    return (
        known
        | found
        | {
            "test loss": fmean(last(runs, "test_loss")),
            "test accuracy": ends,
            "best": best,
        }
    )


def large_batch(m: Measured) -> Figures:
    return trained(m) | {"over the small batch, same seeds": over(m, "baseline, ")}


def remedy(m: Measured) -> Figures:
    return trained(m) | {"over as it is, same seeds": over(m, "as_it_is, ")}


def report(m: Measured) -> Figures:
    return dict(zip(("epoch 1", "epoch 2"), by_epoch(m, "train_accuracy"), strict=False)) | trained(m)


def precise(m: Measured) -> Figures:
    skipped = [max(found) for e in range(m.spec["epochs"]) if (found := m.of(f"skipped_steps_{e + 1}"))]
    is_half = m.spec["precision"] == "fp16"
    return trained(m) | {
        "over fp32, same seeds": over(m, "fp32, "),
        "skipped steps": sum(skipped) if is_half else None,
    }


def beside(m: Measured) -> Rows:
    """Yield only what is measured here; what reports state is in the recipe."""
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        if any(key.startswith(f"reported_{name}_") for key in m.stored["metrics"]):
            place = {"training": m.properties()["recipe"], "figure": name.replace("_", " ")}
            yield place, {"ddpperf": fmean(last([m, *m.named("seed=")], name))}


def changed(m: Measured) -> Rows:
    yield {"change": "N devices instead of one"}, {"points of test accuracy": over(m, "one_device, ")}
    changes = {
        "without scaling the learning rate": "unscaled_rate, ",
        "without set_epoch": "without_set_epoch, ",
    }
    for change, name in changes.items():
        yield {"change": change}, {"points of test accuracy": over(m, name, swapped=True)}


def sampler(m: Measured) -> Figures:
    rest, drop = m.spec["epoch_images"] % m.N, m.spec["drop_last"]
    found = {"missing images": rest if drop else 0, "repeated images": 0 if drop or not rest else m.N - rest}
    return found | {"same place next epoch": m.most("repeated_places")}


def cost_of_training(m: Measured) -> Figures:
    runs = [m, *m.named("seed=")]
    totals = [sum(max(one.of(f"train_seconds_{e + 1}")) for e in range(m.spec["epochs"])) for one in runs]
    return {"device-minutes": m.N * fmean(totals) / 60}


CPU, TWO = "perf/baselines/cpu2-epyc-25-17-1/0014_core.json", "perf/baselines/h100-80gb-hbm3x2/0005_core.json"
LONG, MUON, PRECISION, REMEDIES, REPORTS = (
    f"docs/runs/h200x1-{name}.json.gz" for name in ("long", "muon", "precision", "remedies", "reports")
)
LARGE_BATCH, LONG_TWO = "docs/runs/h200x2-large_batch.json.gz", "docs/runs/h200x2-long.json.gz"
BY_RECIPE = "devices, training|global batch"
# the title, the tests, the rows and the columns, the figures, and the runs
CASES: tuple[tuple[str, str, str, Callable[[Measured], Figures | Rows], Sequence[str]], ...] = (
    (
        "Q4: accuracy with a large batch",
        "large_batch|long_run",
        BY_RECIPE,
        large_batch,
        (CPU, TWO, MUON, LARGE_BATCH, LONG_TWO),
    ),
    ("Q4: accuracy with a large batch", "long_run", "devices|global batch", large_batch, (LONG,)),
    ("Q4: remedies for a large batch", "remedies", BY_RECIPE, remedy, (REMEDIES,)),
    ("Q4: the reports' trainings", "report_training", "training, global batch|", report, (REPORTS,)),
    (
        "Q4: the reports' accuracies",
        "remedies|report_training",
        "training, figure|",
        beside,
        (REMEDIES, REPORTS),
    ),
    (
        "Q5: accuracy by devices, rate and set_epoch",
        "same_result_on_more_devices",
        "change|global batch",
        changed,
        (LARGE_BATCH,),
    ),
    (
        "Q5: with and without set_epoch",
        "shards.*|without_set_epoch.*",
        "devices, uneven end, order|",
        sampler,
        (CPU, TWO),
    ),
    ("Mixed precision: accuracy", "precision_accuracy", "precision|global batch", precise, (PRECISION,)),
    ("Cost of a whole training", "long_run", "devices, global batch|", cost_of_training, (LONG,)),
)
