"""Makes the lower part of perf/thresholds.toml from the stored test runs in perf/baselines.

    python -m tools.update_thresholds

A threshold is the worst value of a metric over all stored runs on the same hardware, less 5%. An
eager training step on a GPU has a limit on its CPU seconds instead, which is the worst value plus
25%. The upper part of the file is written by hand and is kept. tests/unit/test_update_thresholds.py
checks that the file is up to date.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, get_args

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.report.text import function_of
from ddpperf.results.metrics import Better
from ddpperf.results.stored_runs import Storage
from ddpperf.results.units import counted
from ddpperf.specs import Spec, to_json
from ddpperf.specs.strategy import APART, DDP_OPTIONS, options_of
from ddpperf.verdict.thresholds import NEVER_NAMED, Threshold, Value, bounded_metrics
from tools.default_suite import default_suite

# These metrics have bounds for every machine, which are written by hand.
BY_HAND = ("speedup_over_eager", "ddp_over_data_parallel", "gradients_over_parameters")
FLOORS, CEILINGS = (
    tuple(name for name in bounded_metrics(better) if name not in BY_HAND)
    for better in (Better.HIGHER, Better.LOWER)
)
ROOT = Path(__file__).parents[1]
MARGIN = Decimal("0.05")
CPU_MARGIN = Decimal("0.25")
# Outside of CUDA graphs, the times of GPU tests differ by 14% between runs (ddpperf/verdict/settings.py),
# so that three runs can agree by chance.
FEWEST_RUNS, FEWEST_RUNS_IN_GRAPH = 5, 3
MADE = "# Made by tools/update_thresholds.py"  # begins the first line that is not written by hand

# Between test runs, a test that the GPUs limit changes by up to 3%. A test that the CPU's launches
# limit changes by 10% to a factor of two, so it has no useful threshold. If the values of a test
# differ by at most 10%, its threshold is at least 0.9 x 0.95 of the median value. So a loss of a
# sixth of the speed is found.
MOST_SPREAD = 0.10
# The largest relative interquartile range of a test's rounds. A test with a larger one agrees
# between test runs only by chance.
MOST_IQR, MOST_IQR_ON_CPU = 0.03, 0.10
# The largest difference of a test's CPU seconds between test runs, over their median. It equals the
# margin, so a run must exceed the largest value by the whole range to cross the limit.
MOST_CPU_SPREAD = 0.25

Case = tuple[str, Spec]  # the test function's name, and the spec of the measurement


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stored test run from perf/baselines, with the metrics of its tests.

    machine: the identifiers of its GPUs, or its host's name. metrics: for each test function and
    spec, the value of each metric.
    """

    machine: frozenset[str]
    metrics: Mapping[Case, Mapping[str, float]]


Suite = Callable[[str], Sequence[tuple[str, Spec]]]


def made(root: Path, suite: Suite | None = None) -> str:
    """Return the generated part of perf/thresholds.toml as text.

    root: the folder of the repository. suite: returns the tests that a run collects by default on a
    hardware key; a threshold that fits none of them is left out. Raises ValueError or NoBaseline
    for a stored run that cannot be read.
    """
    rules = (
        f"{MADE}. A threshold is a test's worst value in the runs in perf/baselines, less {MARGIN:.0%}. "
        f"A test in a CUDA graph has a threshold if {FEWEST_RUNS_IN_GRAPH} stored runs or more measured "
        f"it, and another test if {FEWEST_RUNS} or more did. Its values must differ by at most "
        f"{MOST_SPREAD:.0%} between the runs, and the IQR of its rounds must be at most {MOST_IQR:.0%} on "
        f"GPUs and {MOST_IQR_ON_CPU:.0%} on a CPU.",
        "# An eager training step on a GPU has an upper limit on cpu_seconds instead, because the CPU may "
        f"limit its speed on another machine. The limit is the worst value plus {CPU_MARGIN:.0%}, if the "
        f"values differ by at most {MOST_CPU_SPREAD:.0%} between the runs. The default suite collects "
        "each test that has a threshold.",
    )
    parts = ["".join(fill(rule, 100, subsequent_indent="# ") + "\n" for rule in rules)]
    for folder in sorted(path for path in (root / "perf" / "baselines").glob("*") if path.is_dir()):
        storage = Storage(root=root, hardware_key=folder.name)
        runs = [run for path in sorted(folder.glob("*.json")) if (run := read(path, storage)) is not None]
        basis = f"{counted(len(runs), 'run')} on {counted(machine_count(runs), 'machine')}"
        found = thresholds(folder.name, runs)
        if suite is not None:
            collected = suite(folder.name)
            found = [threshold for threshold in found if any(threshold.applies(*case) for case in collected)]
        entries = [entry(threshold) for threshold in found]
        how = (
            f"each threshold is the worst value in {basis}, less {MARGIN:.0%}"
            if entries
            else f"no thresholds, because no test is steady in enough runs, found {basis}"
        )
        parts += [f"# {folder.name}: {how}.\n", *entries]
    return "\n".join(parts)


def read(path: Path, storage: Storage) -> Run | None:
    """Read a stored test run, or return None if one of its steps was slowed down on purpose."""
    measured = storage.load(path).measured
    if any(test.spec.delay_seconds or test.spec.fault for test in measured.values()):
        return None
    document = json.loads(path.read_text())
    environment = document["ddpperf"]["environment"]
    metrics: dict[Case, dict[str, float]] = {}
    for benchmark in document["benchmarks"]:
        test = function_of(benchmark["fullname"])
        case = (test, measured[benchmark["fullname"]].spec)
        if case in metrics:
            raise ValueError(f"{path} has two cases of {test} with the same spec; remove one of them")
        ours = benchmark["extra_info"]["ddpperf"]["metrics"]
        steady = spread(measured[benchmark["fullname"]].all_step_seconds()) <= (
            MOST_IQR if environment["gpus"] else MOST_IQR_ON_CPU
        )
        usable = ("launch_bound", *CEILINGS, *(FLOORS if steady else ()))
        metrics[case] = {name: ours[name]["value"] for name in usable if name in ours}
    machine = frozenset(gpu["uuid"] for gpu in environment["gpus"]) or frozenset([environment["hostname"]])
    return Run(machine=machine, metrics=metrics)


def spread(seconds: Sequence[float]) -> float:
    """Return the relative interquartile range of a test's rounds; infinite for too few rounds."""
    return relative_iqr(seconds) if len(seconds) >= FEWEST_ROUNDS else math.inf


def machine_count(runs: Iterable[Run]) -> int:
    """Return the number of machines on which the test runs were made.

    Two runs that share a GPU were made on the same machine.
    """
    machines: list[frozenset[str]] = []
    for run in runs:
        same = [machine for machine in machines if machine & run.machine]
        machines = [machine for machine in machines if machine not in same] + [run.machine.union(*same)]
    return len(machines)


def thresholds(hardware: str, runs: Sequence[Run]) -> list[Threshold]:
    """Return the thresholds that follow from all stored runs on one kind of hardware."""
    cases = list(dict.fromkeys(case for run in runs for case in run.metrics))
    found: list[Threshold] = []
    for test, spec in cases:
        by_run = [run.metrics[test, spec] for run in runs if (test, spec) in run.metrics]
        if len(by_run) < (FEWEST_RUNS_IN_GRAPH if spec.captured else FEWEST_RUNS):
            continue
        threshold = Threshold(
            hardware=hardware,
            test=test,
            where=where(spec),
            bounds=bounds(by_run, captured=spec.captured),
            number=len(found) + 1,
        )
        alone = sum(threshold.applies(name, other) for name, other in cases) == 1
        if threshold.bounds and alone:
            found.append(threshold)
    return found


def bounds(by_run: Sequence[Mapping[str, float]], *, captured: bool) -> dict[str, float]:
    """Return the lower limits or the upper limits of a test's metrics.

    An eager training step on a GPU has upper limits only, on its CPU seconds. Its speed has no
    limit, because the CPU's launches may limit it on another machine. All other tests have lower
    limits only. by_run: the metrics of the test in each stored run.
    """
    if not captured and any("launch_bound" in metrics for metrics in by_run):
        found = agreed(by_run, CEILINGS, MOST_CPU_SPREAD)
        return {name: float(raised(max(values))) for name, values in found.items()}
    found = agreed(by_run, FLOORS, MOST_SPREAD)
    return {name: float(lowered(min(values))) for name, values in found.items()}


def agreed(
    by_run: Sequence[Mapping[str, float]], names: Sequence[str], most: float
) -> dict[str, list[float]]:
    """Return the values of each metric that every stored run has with nearly the same value.

    most: the largest allowed difference between two runs, as a fraction of the median.
    """
    values = {name: [metrics[name] for metrics in by_run if name in metrics] for name in names}
    return {
        name: found for name, found in values.items() if len(found) == len(by_run) and is_quiet(found, most)
    }


def where(spec: Spec) -> dict[str, Value]:
    """Return the fields of a spec that identify a test in perf/thresholds.toml.

    They are written under the key `where`. The options of other parallel strategies are left out,
    and values that TOML does not have, such as None.
    """
    left_out = {
        "measurement",
        *NEVER_NAMED,
        *(DDP_OPTIONS.keys() - options_of(getattr(spec, "strategy", ""))),
        *APART,
    }
    values = {name: value for name, value in to_json(spec).items() if name not in left_out}
    return {name: value for name, value in values.items() if isinstance(value, get_args(Value))}


def is_quiet(values: Sequence[float], most: float) -> bool:
    """Return whether a metric is steady over several stored test runs.

    A metric is steady if its largest and smallest value differ by at most `most` x the median.
    """
    return min(values) > 0 and max(values) - min(values) <= most * median(values)


def lowered(worst: float) -> Decimal:
    """Return the lowest value of a metric less 5%, rounded down to 3 significant digits."""
    return _three_digits(Decimal(repr(worst)) * (1 - MARGIN), ROUND_FLOOR)


def raised(worst: float) -> Decimal:
    """Return the largest CPU seconds plus 25%, rounded up to 3 significant digits."""
    return _three_digits(Decimal(repr(worst)) * (1 + CPU_MARGIN), ROUND_CEILING)


def _three_digits(value: Decimal, rounding: str) -> Decimal:
    return value.quantize(Decimal(1).scaleb(value.adjusted() - 2), rounding=rounding)


def entry(threshold: Threshold) -> str:
    case = ", ".join(f"{name} = {_toml(value)}" for name, value in threshold.where.items())
    lines = [
        f"hardware = {_toml(threshold.hardware)}",
        f"test = {_toml(threshold.test)}",
        f"where = {{ {case} }}",
    ]
    lines += [f"{metric} = {_toml(bound)}" for metric, bound in threshold.bounds.items()]
    return "\n".join(["[[threshold]]", *lines, ""])


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:_}" if abs(value) >= 10_000 else repr(value)


def by_hand(file: Path) -> str:
    """Return the upper part of perf/thresholds.toml, which is written by hand.

    Raises ValueError for a [decision] in the generated part of the file, which is overwritten.
    """
    text = file.read_text() if file.exists() else ""
    before, *rest = re.split(rf"^(?={re.escape(MADE)})", text, flags=re.MULTILINE)
    lost = re.search(r"^\s*\[+\s*[\"']?decision.*", "".join(rest), flags=re.MULTILINE)
    if lost:
        raise ValueError(
            f"{file} has {lost[0].strip()} below the line {MADE!r}, which is overwritten; "
            "move it above that line"
        )
    return before + "\n" * (before[-1:] not in ("", "\n"))


def main() -> None:
    file, text = ROOT / "perf" / "thresholds.toml", made(ROOT, default_suite)
    file.write_text(by_hand(file) + text)
    print("\n".join(line for line in text.splitlines() if line.startswith("#")))


if __name__ == "__main__":
    main()
