"""Makes the tables of docs/reports.md: what common definitions give for the same stored measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from ddpperf.analysis.scaling import amdahl_speedup, fit_amdahl, fit_gustafson, gustafson_speedup
from ddpperf.report.questions.figures import training_of
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.results import units
from tools.markdown_tables import ROOT, cases, markdown, one
from tools.plain_timing import PARTS, WAYS

BATCH = 128  # the batch size of the tables that show one batch size
BUFFER = 2**30  # the bytes of the all_reduces
CAPTURED = {"execution": "graph", "model": "resnet18_cifar", "strategy": "ddp"}
EAGER = {"execution": "eager", "model": "resnet18_cifar"}
MILLISECONDS = "{:.3f}".format


def value(case: Case, metric: str) -> float:
    """Return the value of a metric that a case has."""
    found: float = case.metrics[metric]["value"]
    return found


def single_device_seconds(case: Case) -> float:
    """Return t(1) of the case: the step time of the slowest device alone."""
    return median(case.references["one_device"].slowest_device_seconds(training_of(case).world_size).values())


def world_sizes(found: Sequence[Case], test: str) -> list[int]:
    """Return the world sizes above 1 that a test measured."""
    return sorted({case.measured.spec.world_size for case in of_functions(found, test)} - {1})


# --- speedup


def speedups_table(run: str) -> str:
    """Return a Markdown table of the speedups that common formulas give for the same step times."""
    found = cases(run)
    sizes = world_sizes(found, "test_weak_scaling")
    columns = [speedups(found, N) for N in sizes]
    rows = []
    for place, (formula, kept, name) in enumerate(SPEEDUPS):
        values = [column[place] for column in columns]
        rows.append((formula, kept, *map(units.factor, values), name.format(*against(columns[-1], place))))
    return markdown(("formula", "constant", *(f"{N} GPUs" for N in sizes), "what it is"), rows)


# The formula, the constant batch size, and what the value is. {0} is the last value of the table over
# the weak-scaling speedup, {1} over the strong-scaling speedup.
SPEEDUPS = (
    ("N t(1) / t(N), times of a step", f"{BATCH} images per GPU", "weak-scaling speedup"),
    ("t(1) / t(N), times of a step", f"{BATCH} images per GPU", "efficiency, not a speedup"),
    ("T(1) / T(N), times of an epoch", f"{BATCH} images per GPU", "weak-scaling speedup, not strong scaling"),
    ("N T(1) / T(N), times of an epoch", f"{BATCH} images per GPU", "wrong: {0:.2f} times the speedup"),
    ("t(1) / t(N), times of a step", f"{BATCH} images of all GPUs", "strong-scaling speedup"),
    (
        "T(1) / T(N), called strong scaling",
        f"{BATCH} images per GPU",
        "wrong: {1:.2f} times the strong speedup",
    ),
)


def speedups(found: Sequence[Case], N: int) -> list[float]:
    """Return the value of each formula of SPEEDUPS on N devices."""
    weak = one(found, "test_weak_scaling", world_size=N, per_rank_batch_size=BATCH, **CAPTURED)
    strong = one(found, "test_strong_scaling", world_size=N, global_batch_size=BATCH, **CAPTURED)
    t1, tN = single_device_seconds(weak), weak.seconds
    spec = training_of(weak)
    epochs = spec.one_device().steps_per_epoch * t1 / (spec.steps_per_epoch * tN)
    return [N * t1 / tN, t1 / tN, epochs, N * epochs, single_device_seconds(strong) / strong.seconds, epochs]


def against(values: Sequence[float], place: int) -> tuple[float, float]:
    """Return a value divided by the weak-scaling speedup, and by the strong-scaling speedup."""
    return values[place] / values[0], values[place] / values[4]


def laws_table(run: str) -> str:
    """Return a Markdown table of the speedup on 32 devices that laws predict from the same stored run.

    Amdahl's law is fitted to the speedups of strong scaling, which it describes, and to those of
    weak scaling, which it does not describe.
    """
    found = cases(run)
    most = max(world_sizes(found, "test_amdahl"))
    strong = one(found, "test_amdahl", world_size=most, global_batch_size=BATCH)
    weak = one(found, "test_gustafson", world_size=most, per_rank_batch_size=BATCH)
    fits = (
        ("Amdahl's law", strong, f"{BATCH} images of all GPUs", fit_amdahl, amdahl_speedup),
        ("Gustafson's law", weak, f"{BATCH} images per GPU", fit_gustafson, gustafson_speedup),
        ("Amdahl's law, wrong here", weak, f"{BATCH} images per GPU", fit_amdahl, amdahl_speedup),
    )
    rows = []
    for name, case, constant, fit, law in fits:
        speedups = {N: case.value(f"speedup_of_{N}") for N in range(2, most + 1)}
        known = {N: speedup for N, speedup in speedups.items() if speedup is not None}
        fraction = fit(list(known), list(known.values())).value
        measured = ", ".join(f"{units.factor(speedup)} on {N}" for N, speedup in known.items())
        rows.append((name, constant, measured, units.percent(fraction), units.factor(law(fraction, 32))))
    headings = ("law", "constant", "measured speedups", "serial fraction", "predicted speedup on 32 GPUs")
    return markdown(headings, rows)


# --- the use of a GPU


def busy_table(run: str) -> str:
    """Return a Markdown table of how busy a GPU is in a step, and of its model FLOPs utilization."""
    rows = [
        (
            str(training_of(case).world_size),
            *step_of(case),
            units.percent(value(case, "gpu_busy_fraction")),
            units.percent(value(case, "mfu")),
        )
        for case in of_functions(cases(run), "test_step_breakdown")
    ]
    return markdown(("GPUs", "execution", "batch per GPU", "GPU busy", "MFU"), rows)


# --- communication and bandwidth


def communications_table(run: str) -> str:
    """Return a Markdown table of a DDP step's communication time by several definitions, in ms."""
    metrics = {
        "t(N) - t(1)": "step_minus_one_device_seconds",
        "exposed, by difference": "exposed_comm_seconds",
        "exposed, by trace": "traced_exposed_comm_seconds",
        "kernels of the rank that waits most": "traced_comm_seconds",
        "kernels of the rank that waits least": "comm_without_waiting_seconds",
        "all_reduces alone": "replayed_comm_seconds",
    }
    rows = []
    for case in of_functions(cases(run), "test_comm_split"):
        found = (MILLISECONDS(1e3 * value(case, metric)) for metric in metrics.values())
        rows.append((*step_of(case), MILLISECONDS(1e3 * case.seconds), *found))
    return markdown(("execution", "batch per GPU", "step", *metrics), rows)


def step_of(case: Case) -> tuple[str, str]:
    spec = training_of(case)
    return spec.execution, str(spec.per_rank_batch_size)


# --- DataParallel


def data_parallel_table(run: str) -> str:
    """Return a Markdown table of DataParallel and DDP with the same batch_size of the DataLoader.

    The last column compares both with the same number of images per device.
    """
    found = cases(run)
    rows = []
    for N in world_sizes(found, "test_weak_scaling"):
        weak = {"world_size": N, "per_rank_batch_size": BATCH, **EAGER}
        ddp = one(found, "test_weak_scaling", strategy="ddp", **weak)
        as_many = one(found, "test_weak_scaling", strategy="data_parallel", **weak)
        split = {"world_size": N, "global_batch_size": BATCH, "strategy": "data_parallel"}
        same_argument = one(found, "test_strong_scaling", **split)
        speeds = [value(case, "images_per_second") for case in (same_argument, ddp, as_many)]
        counts = (str(N), str(BATCH), str(BATCH // N), str(BATCH))
        ratios = (units.factor(speeds[1] / speeds[0]), units.factor(speeds[1] / speeds[2]))
        rows.append((*counts, *map(units.rate, speeds[:2]), *ratios))
    headings = ("GPUs", "batch_size", "per GPU in DataParallel", "per GPU in DDP", "DataParallel", "DDP")
    return markdown((*headings, "DDP's lead, same batch_size", "DDP's lead, same images per GPU"), rows)


# --- precision


def precisions_table(run: str) -> str:
    """Return a Markdown table of the step times in fp32, tf32, bf16 and fp16, with their ratios."""
    found = cases(run)
    trained = of_functions(found, "test_precision")
    batches = sorted({training_of(case).per_rank_batch_size for case in trained})
    rows = []
    for batch in batches:
        steps = {
            precision: one(found, "test_precision", per_rank_batch_size=batch, precision=precision).seconds
            for precision in ("fp32", "tf32", "bf16", "fp16")
        }
        over = [units.factor(steps[other] / steps["fp16"]) for other in ("fp32", "tf32")]
        rows.append((str(batch), *map(units.seconds, steps.values()), *over))
    return markdown(("batch", *steps, "fp16's speedup over fp32", "over tf32"), rows)


# --- accuracy


def mistakes_table(run: str) -> str:
    """Return a Markdown table of how test accuracy changes by more devices and by two mistakes."""
    metrics = {
        "all GPUs instead of one": "accuracy_over_one_device",
        "learning rate of one GPU's batch": "accuracy_unscaled_rate",
        "without set_epoch": "accuracy_without_set_epoch",
    }
    case = one(cases(run), "test_same_result_on_more_devices")
    rows = []
    for change, metric in metrics.items():
        low, high = case.interval(metric) or (float("nan"),) * 2
        points = [units.points(fraction) for fraction in (value(case, metric), low, high)]
        rows.append((change, points[0], f"{points[1]} to {points[2]}"))
    return markdown(("change", "change of test accuracy in points", "95% interval"), rows)


# --- clocks


def clocks_table(result: str) -> str:
    """Return a Markdown table of the same steps, timed with and without waiting for the device.

    result: a file with the output of tools/plain_timing.py.
    """
    rows = []
    steps = json.loads((ROOT / result).read_text())["steps"]
    (step,) = (step for step in steps if step["batch_size"] == BATCH)
    for way in WAYS:
        parts = (units.seconds(step[way][part]) for part in (*PARTS, "step"))
        rows.append((way, *parts, f"{step[way]['step'] / step[WAYS[-1]]['step'] - 1:+.0%}"))
    return markdown(("the loop waits", *PARTS, "step", "error of the step"), rows)
