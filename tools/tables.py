"""The tables of the README and of docs/, each made of a stored run or of what another program printed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.report.summary import summary_lines
from ddpperf.report.text import short
from ddpperf.report.warnings import warnings_of
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, RunSpec, format_bytes
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS
from ddpperf.verdict.two_stage_test import Finding
from perf.common.recipes import read_recipes

ROOT = Path(__file__).parents[1]
DOUBTFUL = "\\*"
TOGETHER = ("test_execution", "test_weak_scaling", "test_epoch_scaling")  # shown over all runs


def block(run: str, *, first: bool = False) -> str:
    """The table of the stored run at `run`, a path below the root; first: only of each file's first test that was measured."""
    document = json.loads((ROOT / run).read_text())
    if first:
        by_file = {each["fullname"].partition("::")[0]: each for each in reversed(document["benchmarks"])}
        document["benchmarks"] = list(reversed(by_file.values()))
        outcomes = document["ddpperf"]["outcomes"]
        document["ddpperf"]["outcomes"] = {
            each["fullname"]: outcomes[each["fullname"]] for each in document["benchmarks"]
        }
    return "\n".join(["```text", *summary_lines(document), "```", ""])


def gate_table(run: str) -> str:
    """What each test of a run tells, and what that costs: information is of a second, 1 / (detectable squared x seconds), as a
    share of the best test's."""
    header = json.loads((ROOT / run).read_text())["ddpperf"]
    selecting = [
        sys.executable,
        "-m",
        "pytest",
        "perf",
        "-m",
        "gate",
        "--collect-only",
        "-q",
        "--device",
        "cpu",
    ]
    selected = subprocess.run(
        selecting, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    seconds = header["timing"]["test_seconds"]
    rows = [row for row in header["against"]["rows"] if row["primary"]]
    told = {
        row["test"]: 1 / (row["detectable"] ** 2 * seconds[row["test"]])
        for row in rows
        if seconds[row["test"]] >= 0.5
    }
    lines = ["| test | stands for | detectable | seconds | information | gate |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -told.get(row["test"], math.inf)):
        test = row["test"]
        share = f"{told[test] / max(told.values()):.2f}" if test in told else "-"
        figures = f"{row['detectable']:.1%} | {seconds[test]:.0f} | {share}"
        lines.append(f"| {short(test)} | {row['metric']} | {figures} | {'yes' if test in selected else ''} |")
    return "\n".join([*lines, ""])


def recipes_table(run: str) -> str:
    """What a run's recipes reached, the best first; of several seeds with the interval of their mean."""
    header = (
        "| recipe | devices | global batch | trained by | test accuracy | points over | images/s | training |"
    )
    rows: list[tuple[float, str]] = []
    notes: list[str] = []
    for benchmark in json.loads((ROOT / run).read_text())["benchmarks"]:
        stored = benchmark["extra_info"]["ddpperf"]
        spec = Measured.from_json(stored).spec
        if not isinstance(spec, RunSpec) or benchmark["name"].startswith("test_same_result"):
            continue
        values = {name: metric["value"] for name, metric in stored["metrics"].items()}
        accuracy, over = f"{values['test_accuracy']:.2%}", "-"
        if "test_accuracy_low" in values:
            accuracy += f" ({values['test_accuracy_low']:.1%} to {values['test_accuracy_high']:.1%})"
        if "accuracy_over_baseline" in values:
            ends = (values[f"accuracy_over_baseline{end}"] * 100 for end in ("", "_low", "_high"))
            over = "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends)
        speed = values["images_per_second"]
        warnings = warnings_of(stored)
        notes += map(of_any_gpu, warnings)
        cases = (
            *(
                recipe_name(spec),
                str(spec.world_size),
                f"{spec.global_batch_size:,}",
                work(spec),
                accuracy,
                over,
            ),
            *(f"{speed:,.0f} {DOUBTFUL * bool(warnings)}".rstrip(), units.seconds(spec.images / speed)),
        )
        rows.append((-values["test_accuracy"], f"| {' | '.join(cases)} |"))
    lines = [header, "|---" * (header.count("|") - 1) + "|", *(row for _, row in sorted(rows)), ""]
    return "\n".join([*lines, *footnotes(notes)])


def of_any_gpu(warning: str) -> str:
    """One sentence for all rows that were throttled, whichever GPU it was."""
    return re.sub(r"GPU \d+ was (.+) during .*", r"a GPU was \1 in some rounds", warning)


def footnotes(notes: Sequence[str]) -> list[str]:
    """What the marks of a table stand for."""
    return [f"{DOUBTFUL} {note}\n" for note in dict.fromkeys(notes)]


def work(spec: RunSpec) -> str:
    """What a recipe is trained by, in which it differs from others."""
    words = [f"{spec.optimizer} {spec.rate:g}, momentum {spec.momentum:g}, decay {spec.weight_decay:g}"]
    words += [f"{spec.warmup_epochs} epoch{'s' * (spec.warmup_epochs > 1)} of warm-up"] * bool(
        spec.warmup_epochs
    )
    words += [f"{spec.schedule} schedule"] * (spec.schedule != "linear")
    words += [f"from {spec.world_size * spec.grow_from} on"] * bool(spec.grow_from)
    words += [f"labels smoothed by {spec.label_smoothing:g}"] * bool(spec.label_smoothing)
    words += [f"cutout of {spec.cutout} pixels"] * bool(spec.cutout)
    return ", ".join(words)


def recipe_name(spec: RunSpec) -> str:
    """Of the recipe that trains so, whatever its form, by the rate that it has or had; none trains so any more otherwise."""
    spec = dataclasses.replace(spec, execution="graph", inductor="")
    had = []
    for each in (*read_recipes("cuda"), *read_recipes("cuda", "long")):
        try:
            if each.like(spec, spec.rate) != spec:
                continue
        except ValueError:
            continue  # its batch cannot be shared by so many
        if each.rate == spec.rate:
            return each.name
        had += [each.name] * (spec.rate in each.rates)
    return had[0] if had else "none of today's recipes"


def over_runs(pattern: str) -> str:
    """A table of the captured cells of TOGETHER: their median over all files of the pattern, each a process set of its own."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(ROOT.glob(pattern), reverse=True):  # in the order of the newest
        shown = []  # what one test measures, another may show again
        for benchmark in json.loads(path.read_text())["benchmarks"]:
            stored = benchmark["extra_info"]["ddpperf"]
            spec = stored["spec"]
            if (
                benchmark["name"].startswith(TOGETHER)
                and spec.get("execution") in CAPTURED_EXECUTIONS
                and spec not in shown
            ):
                cases.setdefault(benchmark["name"], []).append(stored)
                shown.append(spec)
    rows = ["| cell | median | least to most | runs | efficiency | CPU a step |", "|---|---|---|---|---|---|"]
    notes: list[str] = []
    for name, runs in cases.items():
        warnings = [note for run in runs for note in warnings_of(run)]
        notes += map(of_any_gpu, warnings)
        measured = [Measured.from_json(stored) for stored in runs]
        seconds = [median(each.all_step_seconds()) for each in measured]
        spread = f"{units.seconds(min(seconds))} to {units.seconds(max(seconds))}"
        efficiencies = [
            run["metrics"]["efficiency"]["value"] for run in runs if "efficiency" in run["metrics"]
        ]
        efficiency = f"{median(efficiencies):.1%}" if efficiencies else "-"
        cpu_seconds = [value for each in measured for value in each.counter("cpu_seconds").values()]
        cpu = units.seconds(median(cpu_seconds)) if cpu_seconds else "-"
        middle = f"{units.seconds(median(seconds))} {DOUBTFUL * bool(warnings)}".rstrip()
        rows.append(f"| {name} | {middle} | {spread} | {len(runs)} | {efficiency} | {cpu} |")
    return "\n".join([*rows, "", *footnotes(notes)])


def versus(run: str, folder: str) -> str:
    """A table of a run's all_reduces beside those that nccl-tests measured on such a machine: FOLDER has its output for N
    GPUs as N.txt (`all_reduce_perf -b 1K -e 1G -f 4 -t N -g 1 -a 3`), and of calls in a graph (`-G 20`) as N-graph.txt; the
    times in place are taken."""
    rows = [
        "| size | GPUs | form | here | nccl-tests | ratio | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec, ours in all_reduces(run).items():
        output = ROOT / folder / f"{spec.world_size}{'-graph' * spec.captured}.txt"
        if is_plain(spec) and (
            output.exists() or not spec.captured
        ):  # calls in a graph were measured later, on some machines
            theirs = median(in_place(output)[spec.nbytes])
            cases = (
                units.seconds(ours),
                units.seconds(theirs),
                f"{ours / theirs:.3f}",
                f"{(ours - theirs) * 1e6:+.1f} us",
            )
            rows.append(
                f"| {format_bytes(spec.nbytes)} | {spec.world_size} | {spec.execution} | {' | '.join(cases)} |"
            )
    return "\n".join([*rows, ""])


def algorithms_table(run: str) -> str:
    """A run's captured all_reduces in place: by bytes and devices the backend's time, and how fast others are beside it."""
    by_call: dict[tuple[int, int], dict[str, float]] = {}
    for spec, seconds in all_reduces(run).items():
        if spec.captured and spec.in_place:
            by_call.setdefault((spec.nbytes, spec.world_size), {})[
                "NCCL" if is_plain(spec) else spec.algorithm
            ] = seconds
    names = [
        name for name in dict.fromkeys(name for times in by_call.values() for name in times) if name != "NCCL"
    ]
    rows = [f"| size | devices | NCCL | {' | '.join(names)} | the fastest |", "|---" * (len(names) + 4) + "|"]
    for (nbytes, world_size), times in by_call.items():
        if "NCCL" not in times:
            continue
        speeds = [f"{times['NCCL'] / times[name]:.2f}x" if name in times else "-" for name in names]
        cases = (format_bytes(nbytes), str(world_size), units.seconds(times["NCCL"]), *speeds)
        rows.append(f"| {' | '.join(cases)} | {min(times, key=lambda name: times[name])} |")
    return "\n".join([*rows, ""])


def all_reduces(run: str) -> dict[AllReduceSpec, float]:
    """The median seconds of each that test_all_reduce measured."""
    times: dict[AllReduceSpec, float] = {}
    for benchmark in json.loads((ROOT / run).read_text())["benchmarks"]:
        measured = Measured.from_json(benchmark["extra_info"]["ddpperf"])
        if isinstance(measured.spec, AllReduceSpec):
            times.setdefault(measured.spec, median(measured.all_step_seconds()))
    return times


def is_plain(spec: AllReduceSpec) -> bool:
    """Whether it is an all_reduce as nccl-tests measures them."""
    return spec.algorithm == "backend" and spec.in_place


def batches_table(run: str) -> str:
    """How fast each batch was that a search for the largest one tried, and what of the memory it took."""
    (benchmark,) = json.loads((ROOT / run).read_text())["benchmarks"]
    stored = benchmark["extra_info"]["ddpperf"]
    values = {name: metric["value"] for name, metric in stored["metrics"].items()}
    sizes = sorted(
        int(name.removeprefix("step_seconds_at_")) for name in values if name.startswith("step_seconds_at_")
    )
    rows = ["| images a batch | step | images/s | peak memory |", "|---|---|---|---|"]
    for size in sizes:
        seconds, peak = values[f"step_seconds_at_{size}"], values[f"peak_memory_bytes_at_{size}"] / 1e9
        rows.append(f"| {size:,} | {units.seconds(seconds)} | {size / seconds:,.0f} | {peak:.3g} GB |")
    return "\n".join(
        [*rows, "", *(f"{warning}\n" for warning in dict.fromkeys(map(of_any_gpu, warnings_of(stored))))]
    )


def trials_table(folder: str) -> str:
    """What tools/trials.py found, of which each file in `folder` has an output."""
    rows = ["| machine | slowed down by | found | ratios | equal steps suspected |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / folder).glob("*.txt")):
        text = path.read_text()
        answers = re.findall(r"^  \+([\d.]+)% (\w+) ([\d.]+) ", text, re.MULTILINE)
        equal = [
            ratio
            for line in re.findall(r"^trial \d+: equal (.+)$", text, re.MULTILINE)
            for ratio in line.split(", ")
        ]
        for slower in dict.fromkeys(each for each, _, _ in answers):
            found = [(finding, float(ratio)) for each, finding, ratio in answers if each == slower]
            ratios = [ratio for _, ratio in found]
            worse = sum(finding == Finding.WORSE for finding, _ in found)
            suspected = sum(ratio.endswith("*") for ratio in equal)
            cases = (
                f"{worse} of {len(found)}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                f"{suspected} of {len(equal)}",
            )
            rows.append(f"| {path.stem} | {slower} % | {' | '.join(cases)} |")
    return "\n".join([*rows, ""])


def in_place(output: Path) -> dict[int, list[float]]:
    """By bytes, the seconds in place of every run of all_reduce_perf whose output the file holds."""
    times: dict[int, list[float]] = {}
    for line in output.read_text().splitlines():
        columns = line.split()
        if len(columns) >= 13 and columns[0].isdecimal():
            times.setdefault(int(columns[0]), []).append(float(columns[9]) / 1e6)
    return times
