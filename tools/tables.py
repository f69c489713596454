"""Functions that make Markdown tables for README.md and docs/ from stored test runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill, indent
from typing import Any

from ddpperf.report.cases import Case, cases_of, of_functions
from ddpperf.report.summary import summary_lines, verdict_lines
from ddpperf.report.text import ab_cells, markdown_table, without_file
from ddpperf.report.warnings import warnings_of
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, RunSpec, Spec, TrainingSpec, format_bytes
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS
from ddpperf.verdict.two_stage_test import Finding
from perf.common.recipes import read_recipes

ROOT = Path(__file__).parents[1]
MARK = "\\*"  # beside a value with warnings
OVER_RUNS = ("test_execution", "test_weak_scaling", "test_epoch_scaling")  # the tests of `over_runs`


def cases(run: str) -> list[Case]:
    """Return the measured tests of a stored run."""
    return cases_of(json.loads((ROOT / run).read_text()))


def one(found: Sequence[Case], test: str, **attributes: Any) -> Case:
    """Return the only case of a test function whose spec has these attributes."""
    (case,) = (case for case in of_functions(found, test) if has_attributes(case.measured.spec, attributes))
    return case


def has_attributes(spec: Spec, attributes: Mapping[str, Any]) -> bool:
    """Return whether a spec has all of these attributes."""
    return all(getattr(spec, name, None) == value for name, value in attributes.items())


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], below: Sequence[str] = ()) -> str:
    """Return a Markdown table. below: lines below it, such as footnotes."""
    return "\n".join([*markdown_table(headings, rows), "", *below])


def block(run: str, *, first: bool) -> str:
    """Return the summary of a stored test run as a Markdown code block.

    first: show only the first test of each test file.
    """
    document = json.loads((ROOT / run).read_text())
    if first:
        last_first = reversed(document["benchmarks"])
        by_file = {test["fullname"].partition("::")[0]: test for test in last_first}
        document["benchmarks"] = list(reversed(by_file.values()))
        shown = {test["fullname"] for test in document["benchmarks"]}
        outcomes = document["ddpperf"]["outcomes"].items()
        document["ddpperf"]["outcomes"] = {test: outcome for test, outcome in outcomes if test in shown}
    lines = [*summary_lines(document), *verdict_lines(document["ddpperf"])]
    return "\n".join(["```text", *lines, "```", ""])


def gate_table(run: str) -> str:
    """Return a Markdown table of the smallest slow-down that each test of an A/B run can detect.

    The column "information" is 1 / (detectable squared x seconds), divided by its largest value in
    the table.
    """
    header = json.loads((ROOT / run).read_text())["ddpperf"]
    command = shlex.split(f"{sys.executable} -m pytest perf -m gate --collect-only -q --device cpu")
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    selected = finished.stdout.splitlines()
    seconds = header["timing"]["test_seconds"]
    rows = [row for row in header["against"]["rows"] if row["primary"]]
    information = {
        row["test"]: 1 / (row["detectable"] ** 2 * seconds[row["test"]])
        for row in rows
        if seconds[row["test"]] >= 0.5
    }
    lines = []
    for row in sorted(rows, key=lambda row: -information.get(row["test"], math.inf)):
        test = row["test"]
        relative = f"{information[test] / max(information.values()):.2f}" if test in information else "-"
        figures = (f"{row['detectable']:.1%}", f"{seconds[test]:.0f}", relative)
        lines.append((without_file(test), row["metric"], *figures, "yes" if test in selected else ""))
    return markdown(("test", "metric", "detectable", "seconds", "information", "gate"), lines)


def findings_table(run: str) -> str:
    """Return a Markdown table of what an A/B run found about each test."""
    rows = json.loads((ROOT / run).read_text())["ddpperf"]["against"]["rows"]
    cells = [
        {"test": without_file(row["test"]), "metric": row["metric"], **ab_cells(row)}
        for row in rows
        if row["primary"] and row["control"] is None
    ]
    return markdown(tuple(cells[0]), [tuple(row.values()) for row in cells])


def recipes_table(run: str, tests: Sequence[str] = ("test_large_batch", "test_long_run")) -> str:
    """Return a Markdown table of the trainings of a test run, the best accuracy first.

    tests: the test functions that trained. Intervals are 95% confidence intervals over random seeds.
    Columns without any figure do not appear.
    """
    rows: list[tuple[float, dict[str, str]]] = []
    notes: list[str] = []
    for case in of_functions(cases(run), *tests):
        spec, values = case.measured.spec, {name: metric["value"] for name, metric in case.metrics.items()}
        assert isinstance(spec, RunSpec)
        speed, mirrored = values["images_per_second"], case.value("mirrored_test_accuracy")
        notes += map(of_any_gpu, case.warnings)
        row = {
            "recipe": case.recipe or recipe_name(spec),
            "devices": str(spec.world_size),
            "global batch": f"{spec.global_batch_size:,}",
            "trained by": work(spec),
            "training accuracy": accuracy_text(case, "train_accuracy"),
            "test accuracy": accuracy_text(case, "test_accuracy"),
            "mirrored": "-" if mirrored is None else f"{mirrored:.2%}",
            "points over": points_text(case, "accuracy_over_baseline"),
            "points over as it is": points_text(case, "accuracy_over_as_it_is"),
            "images/s": f"{speed:,.0f} {MARK * bool(case.warnings)}".rstrip(),
            "training": units.seconds(spec.images / speed),
        }
        rows.append((-values["test_accuracy"], row))
    best_first = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    columns = [name for name in best_first[0] if any(row[name] != "-" for row in best_first)]
    return markdown(columns, ([row[name] for name in columns] for row in best_first), footnotes(notes))


def accuracy_text(case: Case, metric: str) -> str:
    """Return an accuracy with its interval over seeds, and what course reports state."""
    text = f"{case.value(metric):.2%}"
    if ends := case.interval(metric):
        text += " ({:.1%} to {:.1%})".format(*ends)
    stated = [f"{report}: {accuracy:.2%}" for report, accuracy in case.reported(metric).items()]
    return f"{text}; reports {', '.join(stated)}" if stated else text


def points_text(case: Case, metric: str) -> str:
    """Return a difference of two accuracies in percentage points, with its interval over seeds."""
    if (difference := case.value(metric)) is None:
        return "-"
    ends = case.interval(metric)
    return units.points(difference) + (" ({} to {})".format(*map(units.points, ends)) if ends else "")


def of_any_gpu(warning: str) -> str:
    """Return a warning without the GPU's number, so that several rows can share a footnote."""
    return re.sub(r"GPU \d+ was (.+) during .*", r"a GPU was \1 in some rounds", warning)


def footnotes(notes: Sequence[str]) -> list[str]:
    return [f"{MARK} {note}\n" for note in dict.fromkeys(notes)]


def work(spec: RunSpec) -> str:
    """Return a short description of a training recipe, such as its optimizer and learning rate."""
    is_plain_loop = spec.decay_vectors and not spec.nesterov
    words = [f"{spec.optimizer} {spec.rate:g}, momentum {spec.momentum:g}, decay {spec.weight_decay:g}"]
    words = [f"plain loop, rate {spec.rate:g}"] if is_plain_loop else words
    first = spec.warmup_epochs
    words += [f"{first} epoch{'s' * (first > 1)} of warm-up"] * bool(first)
    schedules = {"constant": "constant rate", "linear": "linear decay", "multistep": "multi-step schedule"}
    schedule = schedules.get(spec.schedule, f"{spec.schedule.replace('_', '-')} schedule")
    words += [schedule] * (spec.schedule != "constant" or not is_plain_loop)
    words += [f"{spec.accumulation_steps} parts of a batch"] * (spec.accumulation_steps > 1)
    words += [f"gradients clipped to {spec.clip_norm:g}"] * bool(spec.clip_norm)
    words += ["recomputed BatchNorm statistics"] * spec.recompute_statistics
    words += [f"batch size grows from {spec.world_size * spec.grow_from}"] * bool(spec.grow_from)
    words += [f"labels smoothed by {spec.label_smoothing:g}"] * bool(spec.label_smoothing)
    words += [f"cutout of {spec.cutout} pixels"] * bool(spec.cutout)
    words += [f"CutMix in {spec.cutmix:.0%} of the images"] * bool(spec.cutmix)
    words += [f"crops of {spec.crop_padding} pixels"] * (spec.crop_padding != RunSpec.crop_padding)
    words += [f"the last {spec.uncropped_epochs} epochs uncropped"] * bool(spec.uncropped_epochs)
    words += ["averaged weights"] * spec.average_weights
    return ", ".join(words)


def recipe_name(spec: RunSpec) -> str:
    """Return the name of the recipe in perf/recipes.toml that has this training spec.

    The learning rate may be any value that tuning tries for the recipe.
    """
    spec = dataclasses.replace(spec, execution="graph", inductor="")
    had = []
    for recipe in (*read_recipes("cuda"), *read_recipes("cuda", "long")):
        try:
            if recipe.like(spec, spec.rate) != spec:
                continue
        except ValueError:
            continue  # its batch does not divide over these devices
        if recipe.rate == spec.rate:
            return recipe.name
        had += [recipe.name] * (spec.rate in recipe.rates)
    return had[0] if had else "an earlier recipe"


def over_runs(pattern: str) -> str:
    """Return a Markdown table of the times of captured training steps over several stored runs.

    pattern: a glob pattern for the files of the runs. The table has the tests named in OVER_RUNS.
    """
    cases: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(ROOT.glob(pattern), reverse=True):  # in the order of the newest run
        shown = []  # specs; two tests may measure the same one
        for benchmark in json.loads(path.read_text())["benchmarks"]:
            stored = benchmark["extra_info"]["ddpperf"]
            spec = stored["spec"]
            captured = spec.get("execution") in CAPTURED_EXECUTIONS
            if captured and benchmark["name"].startswith(OVER_RUNS) and spec not in shown:
                cases.setdefault(benchmark["name"], []).append(stored)
                shown.append(spec)
    rows = []
    notes: list[str] = []
    for name, runs in cases.items():
        warnings = [note for run in runs for note in warnings_of(run)]
        notes += map(of_any_gpu, warnings)
        measured = [Measured.from_json(stored) for stored in runs]
        seconds = [median(step.all_step_seconds()) for step in measured]
        spread = f"{units.seconds(min(seconds))} to {units.seconds(max(seconds))}"
        found = [run["metrics"]["efficiency"]["value"] for run in runs if "efficiency" in run["metrics"]]
        efficiency = f"{median(found):.1%}" if found else "-"
        cpu_seconds = [value for step in measured for value in step.counter("cpu_seconds").values()]
        cpu = units.seconds(median(cpu_seconds)) if cpu_seconds else "-"
        middle = f"{units.seconds(median(seconds))} {MARK * bool(warnings)}".rstrip()
        rows.append((name, middle, spread, str(len(runs)), efficiency, cpu))
    headings = ("case", "median", "least to most", "runs", "efficiency", "CPU per step")
    return markdown(headings, rows, footnotes(notes))


def versus(run: str, folder: str) -> str:
    """Return a Markdown table that compares a run's all-reduce times with NVIDIA's nccl-tests.

    The file N.txt in the folder has the output of nccl-tests on N GPUs, from `all_reduce_perf -b 1K
    -e 1G -f 4 -t N -g 1 -a 3`. N-graph.txt has the output with `-G 20`, which measures calls in a
    CUDA graph. All all-reduces are in place.
    """
    rows = []
    for spec, ours in all_reduces(cases(run)).items():
        output = ROOT / folder / f"{spec.world_size}{'-graph' * spec.captured}.txt"
        if is_plain(spec) and (output.exists() or not spec.captured):  # not every machine has graph calls
            theirs = median(in_place(output)[spec.nbytes])
            row = [format_bytes(spec.nbytes), str(spec.world_size), spec.execution, units.seconds(ours)]
            row += [units.seconds(theirs), f"{ours / theirs:.3f}", f"{(ours - theirs) * 1e6:+.1f} us"]
            rows.append(row)
    return markdown(("size", "GPUs", "execution", "here", "nccl-tests", "ratio", "difference"), rows)


def algorithms_table(run: str) -> str:
    """Return a Markdown table of NCCL's all-reduce times in a CUDA graph, and of other algorithms.

    The other algorithms have the speedup over NCCL.
    """
    by_call: dict[tuple[int, int], dict[str, float]] = {}
    for spec, seconds in all_reduces(cases(run)).items():
        if spec.captured and spec.in_place:
            name = "NCCL" if is_plain(spec) else spec.algorithm
            by_call.setdefault((spec.nbytes, spec.world_size), {})[name] = seconds
    names = list(dict.fromkeys(name for times in by_call.values() for name in times if name != "NCCL"))
    rows = []
    for (nbytes, world_size), times in by_call.items():
        if "NCCL" not in times:
            continue
        speeds = [f"{times['NCCL'] / times[name]:.2f}x" if name in times else "-" for name in names]
        fastest = min(times, key=times.__getitem__)
        rows.append((format_bytes(nbytes), str(world_size), units.seconds(times["NCCL"]), *speeds, fastest))
    return markdown(("size", "devices", "NCCL", *names, "the fastest"), rows)


def all_reduces(found: Sequence[Case]) -> dict[AllReduceSpec, float]:
    """Return the time, in seconds, of each all-reduce: the median over the cases that measured it.

    Cases of A/B runs do not count.
    """
    times: dict[AllReduceSpec, list[float]] = {}
    for case in found:
        if isinstance(case.measured.spec, AllReduceSpec) and not case.side:
            times.setdefault(case.measured.spec, []).append(case.seconds)
    return {spec: median(seconds) for spec, seconds in times.items()}


def is_plain(spec: AllReduceSpec) -> bool:
    """Return whether a spec describes an all-reduce in place by NCCL or gloo, as in nccl-tests."""
    return spec.algorithm == "backend" and spec.in_place


def batches_table(run: str) -> str:
    """Return a Markdown table of the step time, throughput and peak memory of each batch size.

    run: the file of a stored run of test_largest_batch.
    """
    (benchmark,) = json.loads((ROOT / run).read_text())["benchmarks"]
    stored = benchmark["extra_info"]["ddpperf"]
    values = {name: metric["value"] for name, metric in stored["metrics"].items()}
    prefix = "step_seconds_at_"
    sizes = sorted(int(name.removeprefix(prefix)) for name in values if name.startswith(prefix))
    rows = []
    for size in sizes:
        seconds, peak = values[f"step_seconds_at_{size}"], values[f"peak_memory_bytes_at_{size}"] / 1e9
        rows.append((f"{size:,}", units.seconds(seconds), f"{size / seconds:,.0f}", f"{peak:.3g} GB"))
    warnings = dict.fromkeys(map(of_any_gpu, warnings_of(stored)))
    headings = ("images per batch", "step", "images/s", "peak memory")
    return markdown(headings, rows, [f"{warning}\n" for warning in warnings])


def projections_table(run: str) -> str:
    """Return a Markdown table of the extra step time on N devices, predicted and measured.

    The extra step time is t(N) - t(1). The last column shows the error of the guess that the extra
    step time is the same as on fewer devices.
    """
    rows = []
    for case in of_functions(cases(run), "test_projection"):
        spec = case.measured.spec
        assert isinstance(spec, TrainingSpec)
        projected = f"projected_excess_on_{spec.world_size}"
        names = ("plain_excess_seconds", "excess_seconds", projected, f"{projected}_low", f"{projected}_high")
        fewer, measured, value, low, high = (case.metrics[name]["value"] for name in names)
        rows.append(
            (
                str(spec.per_rank_batch_size),
                *map(units.seconds, (fewer, measured, value)),
                f"{units.seconds(low)} to {units.seconds(high)}",
                *(f"{guess / measured - 1:+.1%}" for guess in (value, fewer)),
            )
        )
    columns = ("batch size", "fewer GPUs", "all GPUs", "projected", "95% interval")
    return markdown((*columns, "error", "error of no change"), rows)


def trials_table(folder: str) -> str:
    """Return a Markdown table of the results of tools/trials.py.

    folder: a folder with the output of one machine in each text file.
    """
    rows = []
    for path in sorted((ROOT / folder).glob("*.txt")):
        text = path.read_text()
        answers = re.findall(r"^  \+([\d.]+)% (\w+) ([\d.]+) ", text, re.MULTILINE)
        equal = ", ".join(re.findall(r"^trial \d+: equal (.+)$", text, re.MULTILINE)).split(", ")
        for slower in dict.fromkeys(delay for delay, _, _ in answers):
            found = [(finding, float(ratio)) for delay, finding, ratio in answers if delay == slower]
            ratios = [ratio for _, ratio in found]
            worse = sum(finding == Finding.WORSE for finding, _ in found)
            suspected = sum(ratio.endswith("*") for ratio in equal)
            reach, alike = f"{min(ratios):.3f} to {max(ratios):.3f}", f"{suspected} of {len(equal)}"
            rows.append((path.stem, f"{slower}%", f"{worse} of {len(found)}", reach, alike))
    return markdown(("machine", "slowed down by", "found", "ratios", "equal steps suspected"), rows)


def in_place(output: Path) -> dict[int, list[float]]:
    """Return the times, in seconds, of in-place all-reduces in the output of nccl-tests.

    The keys are buffer sizes in bytes. Each value has one time for each run of all_reduce_perf.
    """
    times: dict[int, list[float]] = {}
    for line in output.read_text().splitlines():
        columns = line.split()
        if len(columns) >= 13 and columns[0].isdecimal():
            times.setdefault(int(columns[0]), []).append(float(columns[9]) / 1e6)
    return times


def baselines_table(folder: str) -> str:
    """Return a Markdown table of the stored runs in a folder, and the command of each run below it."""
    rows = []
    runs_of: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).glob("*/*.json")):
        document = json.loads(path.read_text())
        command = document["ddpperf"]["options"]["command_line"]
        command = re.sub(r"--(verdict|benchmark-json|benchmark-save|traces)[ =]\S+", "", command)
        command = re.sub(
            r"-k ([^'\"].*?)(?= --|$)", lambda found: f"-k {shlex.quote(found[1].strip())}", command
        )  # older runs stored the value of -k without quotes
        command = re.sub(r"imagefolder:\S+", "imagefolder:DIR", command)
        switched = "NCCL_NVLS_ENABLE=0 " * (document["ddpperf"]["environment"].get("nvls") == "0")
        name = str(path.relative_to(ROOT / folder))
        runs_of.setdefault(f"{switched}python3 -m pytest {command}", []).append(name)
        commit = document["ddpperf"]["environment"]["commit"]  # with + if the code was not committed
        rows.append((name, document["datetime"][:10], commit, str(len(document["benchmarks"]))))
    commands = (
        f"{fill(', '.join(names), 100)}:\n\n{command_block(command)}\n" for command, names in runs_of.items()
    )
    return markdown(("run", "day", "commit", "tests"), rows, ["\n".join(commands)])


def command_block(command: str) -> str:
    """Return a shell command as a Markdown code block. Long commands have several lines."""
    parts: list[str] = []  # an option and its value are one part
    for word in map(shlex.quote, shlex.split(command)):
        if parts and parts[-1].startswith("-") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < 90:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return indent(" \\\n".join(lines), "    ")
