"""Make perf/thresholds.toml from the committed runs in perf/baselines: PYTHONPATH=. python tools/update_thresholds.py

A threshold is the worst value of a metric over all runs on that hardware, less 5 %; for a training step whose kernels the CPU
launches, the worst of its CPU seconds, plus 25 %. tests/unit/test_update_thresholds.py checks that the file is what this makes of
the runs. What the file has above that, such as the decision's values, is written by hand, and kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from statistics import median
from typing import Any, get_args

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results.metrics import Better
from ddpperf.results.stored_runs import Storage
from ddpperf.results.units import counted
from ddpperf.specs import Spec
from ddpperf.specs.strategy import APART, DDP_OPTIONS, options_of
from ddpperf.verdict.thresholds import NEVER_NAMED, Threshold, Value, bounded_metrics

FLOORS, CEILINGS = bounded_metrics(Better.HIGHER), bounded_metrics(Better.LOWER)
ROOT = Path(__file__).parents[1]
MARGIN = Decimal("0.05")
CPU_MARGIN = Decimal("0.25")
FEWEST_RUNS = 5
MADE = "# Made by tools/update_thresholds.py"  # begins the first line that is not written by hand

# Between runs, cells bound by the GPUs move by up to 3 %, and cells bound by the CPU's launches by 10 % to a factor of two. A
# threshold for the latter would be crossed by chance, or be so low that it said nothing. With at most 10 %, a further run must
# leave the range seen by half its width to be below the margin, and no threshold is below 0.9 x 0.95 of the median: whatever
# costs a sixth of the speed is seen.
MOST_SPREAD = 0.10
# Of a cell's own rounds in any run. What spreads more is quiet between runs by chance: on GPUs it is bound by launches.
MOST_IQR, MOST_IQR_ON_CPU = 0.03, 0.10
# Of CPU seconds between runs; within a run they are one number. A further run must leave the range seen by its whole width to
# be above the margin.
MOST_CPU_SPREAD = 0.25

Case = tuple[str, Spec]  # the test function's name, and what it measures


@dataclass(frozen=True, kw_only=True)
class Run:
    """A committed run. machine: the identifiers of its GPUs, or its host's name. metrics: by cell, values by name."""

    machine: frozenset[str]
    metrics: Mapping[Case, Mapping[str, float]]


def made(root: Path) -> str:
    """The thresholds of the runs below `root`, as TOML; raises NoBaseline or ValueError for a run that cannot be used."""
    parts = [
        f"{MADE}: the worst of the runs in perf/baselines, less {MARGIN:.0%}. Only what was\n"
        f"# measured in {FEWEST_RUNS} runs or more, spread by at most {MOST_SPREAD:.0%} of its median between them, and by\n"
        f"# at most {MOST_IQR:.0%} ({MOST_IQR_ON_CPU:.0%} on a CPU) between the rounds of each (IQR), has a threshold.\n"
        "# A step whose kernels a CPU launches, one by one, may be bound by that on another machine: it has a greatest\n"
        f"# cpu_seconds instead, the worst plus {CPU_MARGIN:.0%}, if spread by at most {MOST_CPU_SPREAD:.0%} over them.\n"
    ]
    for folder in sorted(path for path in (root / "perf" / "baselines").glob("*") if path.is_dir()):
        storage = Storage(root=root, hardware_key=folder.name)
        runs = [run for path in sorted(folder.glob("*.json")) if (run := read(path, storage)) is not None]
        basis = f"{counted(len(runs), 'run')} on {counted(machine_count(runs), 'machine')}"
        if len(runs) < FEWEST_RUNS:
            parts.append(
                f"# {folder.name}: no thresholds, for {basis} {'is' if len(runs) == 1 else 'are'} too few.\n"
            )
            continue
        entries = [entry(threshold) for threshold in thresholds(folder.name, runs)]
        how = (
            f"the worst of {basis}, less {MARGIN:.0%}"
            if entries
            else f"no thresholds, for of {basis} no cell is in {FEWEST_RUNS}, and steady"
        )
        parts += [f"# {folder.name}: {how}.\n", *entries]
    return "\n".join(parts)


def read(path: Path, storage: Storage) -> Run | None:
    """The run at `path`, or None if one of its steps was slowed or disturbed on purpose."""
    measured = storage.load(path).measured
    if any(each.spec.delay_seconds or each.spec.fault for each in measured.values()):
        return None
    document = json.loads(path.read_text())
    environment = document["ddpperf"]["environment"]
    metrics: dict[Case, dict[str, float]] = {}
    for benchmark in document["benchmarks"]:
        test = benchmark["fullname"].rpartition("::")[2].partition("[")[0]
        case = (test, measured[benchmark["fullname"]].spec)
        if case in metrics:
            raise ValueError(
                f"{path} has two {test} of the same spec, which no threshold tells apart; rename one of them"
            )
        ours = benchmark["extra_info"]["ddpperf"]["metrics"]
        steady = spread(measured[benchmark["fullname"]].all_step_seconds()) <= (
            MOST_IQR if environment["gpus"] else MOST_IQR_ON_CPU
        )
        usable = ("launch_bound", *CEILINGS, *(FLOORS if steady else ()))
        metrics[case] = {name: ours[name]["value"] for name in usable if name in ours}
    machine = frozenset(gpu["uuid"] for gpu in environment["gpus"]) or frozenset([environment["hostname"]])
    return Run(machine=machine, metrics=metrics)


def spread(seconds: Sequence[float]) -> float:
    """The relative IQR of a run's rounds; infinite for too few to have one."""
    return relative_iqr(seconds) if len(seconds) >= FEWEST_ROUNDS else math.inf


def machine_count(runs: Iterable[Run]) -> int:
    """How many machines the runs were on: those that share a GPU were on the same."""
    machines: list[frozenset[str]] = []
    for run in runs:
        same = [machine for machine in machines if machine & run.machine]
        machines = [machine for machine in machines if machine not in same] + [run.machine.union(*same)]
    return len(machines)


def thresholds(hardware: str, runs: Sequence[Run]) -> list[Threshold]:
    """The thresholds of one hardware, numbered in the order in which its cells were first measured."""
    cases = list(dict.fromkeys(case for run in runs for case in run.metrics))
    found: list[Threshold] = []
    for test, spec in cases:
        by_run = [run.metrics[test, spec] for run in runs if (test, spec) in run.metrics]
        if len(by_run) < FEWEST_RUNS:
            continue
        minimum, maximum = bounds(by_run, captured=spec.captured)
        threshold = Threshold(
            hardware=hardware,
            test=test,
            where=where(spec),
            minimum=minimum,
            maximum=maximum,
            number=len(found) + 1,
        )
        alone = sum(threshold.applies(hardware=hardware, test=name, spec=other) for name, other in cases) == 1
        if (minimum or maximum) and alone:
            found.append(threshold)
    return found


def bounds(
    by_run: Sequence[Mapping[str, float]], *, captured: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """A cell's minimum and maximum by metric, either of them empty; by_run: its metrics in each run that measured it.

    A step that had launch_bound 1.00 on two machines was bound by launches on a third, 7 % slower, with nothing changed.
    """
    if not captured and any("launch_bound" in metrics for metrics in by_run):
        return {}, {
            name: float(raised(max(values)))
            for name, values in agreed(by_run, CEILINGS, MOST_CPU_SPREAD).items()
        }
    return {
        name: float(lowered(min(values))) for name, values in agreed(by_run, FLOORS, MOST_SPREAD).items()
    }, {}


def agreed(
    by_run: Sequence[Mapping[str, float]], names: Sequence[str], most: float
) -> dict[str, list[float]]:
    """The values over a cell's runs of those metrics of `names` that all of them have, and that spread by at most the fraction
    `most`."""
    values = {name: [metrics[name] for metrics in by_run if name in metrics] for name in names}
    return {name: each for name, each in values.items() if len(each) == len(by_run) and is_quiet(each, most)}


def where(spec: Spec) -> dict[str, Value]:
    """All fields that a table can have: a run with other options differs in any of them, though all cells of one agree.

    Left out: DDP's options where nothing else is possible, and a value that TOML has not, such as None.
    """
    left_out = {*NEVER_NAMED, *(DDP_OPTIONS.keys() - options_of(getattr(spec, "strategy", ""))), *APART}
    values = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name not in left_out
    }
    return {name: value for name, value in values.items() if isinstance(value, get_args(Value))}


def is_quiet(values: Sequence[float], most: float) -> bool:
    """Whether a metric's values over runs spread by at most the fraction `most`, so that a threshold means something."""
    return min(values) > 0 and max(values) - min(values) <= most * median(values)


def lowered(worst: float) -> Decimal:
    """`worst` less the margin, rounded down to 3 significant digits."""
    return _three_digits(Decimal(repr(worst)) * (1 - MARGIN), ROUND_FLOOR)


def raised(worst: float) -> Decimal:
    """`worst` plus the margin of CPU seconds, rounded up to 3 significant digits."""
    return _three_digits(Decimal(repr(worst)) * (1 + CPU_MARGIN), ROUND_CEILING)


def _three_digits(value: Decimal, rounding: str) -> Decimal:
    return value.quantize(Decimal(1).scaleb(value.adjusted() - 2), rounding=rounding)


def entry(threshold: Threshold) -> str:
    """A threshold as TOML."""
    case = ", ".join(f"{name} = {_toml(value)}" for name, value in threshold.where.items())
    lines = [
        f"hardware = {_toml(threshold.hardware)}",
        f"test = {_toml(threshold.test)}",
        f"where = {{ {case} }}",
    ]
    lines += [
        f"{metric} = {_toml(bound)}" for metric, bound in {**threshold.minimum, **threshold.maximum}.items()
    ]
    return "\n".join(["[[threshold]]", *lines, ""])


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:_}" if abs(value) >= 10_000 else repr(value)


def by_hand(file: Path) -> str:
    """What `file` has above what was made, empty without a file; raises ValueError for a [decision] that would be lost."""
    text = file.read_text() if file.exists() else ""
    before, *rest = re.split(rf"^(?={re.escape(MADE)})", text, flags=re.MULTILINE)
    lost = re.search(r"^\s*\[+\s*[\"']?decision.*", "".join(rest), flags=re.MULTILINE)
    if lost:
        raise ValueError(
            f"{file} has {lost[0].strip()} below the line {MADE!r}, where all is made anew; move it above that"
        )
    return before + "\n" * (before[-1:] not in ("", "\n"))


def main() -> None:
    file, text = ROOT / "perf" / "thresholds.toml", made(ROOT)
    file.write_text(by_hand(file) + text)
    print("\n".join(line for line in text.splitlines() if line.startswith("#")))


if __name__ == "__main__":
    main()
