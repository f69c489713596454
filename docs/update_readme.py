"""Make the README's tables and picture: PYTHONPATH=. python docs/update_readme.py [perf/baselines/KEY/NNNN_NAME.json ...]

Nothing in them is typed by hand; tests/test_readme.py checks that the README is what this makes of the runs that it names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from ddpperf.report.format import format_seconds, short
from ddpperf.report.summary import summary_lines
from ddpperf.results import Measured
from ddpperf.specs import AllReduceSpec, RunSpec, Spec, format_bytes
from ddpperf.specs.strategy import CAPTURED_FORMS
from perf.recipes import read_recipes

ROOT = Path(__file__).parents[1]
PICTURED = ROOT / "docs" / "h200x4.md"
DOCS = ROOT / "docs"
OF_ONE_FILE = (DOCS / "h200x2.md", DOCS / "large_batches.md")  # of perf/, whose runs a whole run does not replace
PAGES = (ROOT / "README.md", PICTURED, *(DOCS / f"{page}.md" for page in ("cpu2", "images", "gate", "own_ddp")), *OF_ONE_FILE)
DOUBTFUL = "\\*"
PICTURE = ROOT / "docs" / "overview.png"
MADE = re.compile(r"<!-- made by docs/update_readme.py from (.+?) -->\n.*?<!-- end -->", re.DOTALL)
FIRST = "the first tests in "  # of each experiment of a run
GATE = "the gate in "  # a run with two equal sides
RECIPES = "the recipes in "  # a run of test_large_batch or test_long_run
ALL_RUNS = "all runs in "  # a folder; else one whole run, or one run and the folder of another's output
TOGETHER = ("test_forms", "test_weak_scaling", "test_epoch_scaling")  # shown over all runs


def block(run: str, *, first: bool = False) -> str:
    """The table of the stored run at `run`, a path below the root; first: only of each file's first test that was measured."""
    document = json.loads((ROOT / run).read_text())
    if first:
        by_file = {each["fullname"].partition("::")[0]: each for each in reversed(document["benchmarks"])}
        document["benchmarks"] = list(reversed(by_file.values()))
        outcomes = document["ddpperf"]["outcomes"]
        document["ddpperf"]["outcomes"] = {each["fullname"]: outcomes[each["fullname"]] for each in document["benchmarks"]}
    return "\n".join(["```text", *summary_lines(document), "```", ""])


def updated(readme: str, runs: Mapping[str, str]) -> str:
    """The README's text with each block made from its run anew, or from the run that `runs` has for its hardware's folder."""

    def made(found: re.Match[str]) -> str:
        source = found[1]
        if source.startswith(ALL_RUNS):
            table = over_runs(source.removeprefix(ALL_RUNS))
        elif source.startswith(GATE):
            table = gate_table(source.removeprefix(GATE))
        elif source.startswith(RECIPES):
            table = recipes_table(source.removeprefix(RECIPES))
        else:
            first = FIRST if source.startswith(FIRST) else ""
            run, both, folder = source.removeprefix(first).partition(" and ")
            run = runs.get(folder_of(run), run)
            source = first + run + both + folder
            table = versus(run, folder) if both else block(run, first=bool(first))
        return f"<!-- made by docs/update_readme.py from {source} -->\n{table}<!-- end -->"

    return MADE.sub(made, readme)


def gate_table(run: str) -> str:
    """What each test of a run tells, and what that costs: information is of a second, 1 / (detectable squared x seconds), as a
    share of the best test's."""
    header = json.loads((ROOT / run).read_text())["ddpperf"]
    selecting = [sys.executable, "-m", "pytest", "perf", "-m", "gate", "--collect-only", "-q", "--device", "cpu"]
    selected = subprocess.run(selecting, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    seconds = header["timing"]["test_seconds"]
    rows = [row for row in header["against"]["rows"] if row["primary"]]
    told = {row["test"]: 1 / (row["detectable"] ** 2 * seconds[row["test"]]) for row in rows if seconds[row["test"]] >= 0.5}
    lines = ["| test | stands for | detectable | seconds | information | gate |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -told.get(row["test"], math.inf)):
        test = row["test"]
        share = f"{told[test] / max(told.values()):.2f}" if test in told else "-"
        figures = f"{row['detectable']:.1%} | {seconds[test]:.0f} | {share}"
        lines.append(f"| {short(test)} | {row['metric']} | {figures} | {'yes' if test in selected else ''} |")
    return "\n".join([*lines, ""])


def recipes_table(run: str) -> str:
    """What a run's recipes reached, the best first; of several seeds with the interval of their mean."""
    header = "| recipe | devices | global batch | trained by | test accuracy | points over | images/s | training |"
    rows, notes = [], []
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
        doubts = [note for note in stored["notes"] if note.startswith("doubtful: ")]
        notes += doubts
        cells = (
            *(recipe_name(spec), str(spec.world_size), f"{spec.global_batch_size:,}", work(spec), accuracy, over),
            *(f"{speed:,.0f} {DOUBTFUL * bool(doubts)}".rstrip(), format_seconds(spec.images / speed)),
        )
        rows.append((-values["test_accuracy"], f"| {' | '.join(cells)} |"))
    lines = [header, "|---" * (header.count("|") - 1) + "|", *(row for _, row in sorted(rows)), ""]
    return "\n".join([*lines, *(f"{DOUBTFUL} {note}\n" for note in dict.fromkeys(notes))])


def work(spec: RunSpec) -> str:
    """What a recipe is trained by, in which it differs from others."""
    words = [f"{spec.optimizer} {spec.rate:g}, momentum {spec.momentum:g}, decay {spec.weight_decay:g}"]
    words += [f"{spec.warmup_epochs} epoch{'s' * (spec.warmup_epochs > 1)} of warm-up"] * bool(spec.warmup_epochs)
    words += [f"from {spec.world_size * spec.grow_from} on"] * bool(spec.grow_from)
    words += [f"labels smoothed by {spec.label_smoothing:g}"] * bool(spec.label_smoothing)
    return ", ".join(words)


def recipe_name(spec: RunSpec) -> str:
    """Of the recipe that trains so, whatever its form, by the rate that it has or had; else what it is."""
    spec = dataclasses.replace(spec, form="graph", inductor="")
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
    return had[0] if had else short(spec.id)


def over_runs(folder: str) -> str:
    """A table of the captured cells of TOGETHER: their median over all runs in `folder`, each a process set of its own."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / folder).glob("*.json"), reverse=True):  # in the order of the newest
        shown = []  # what one test measures, another may show again
        for benchmark in json.loads(path.read_text())["benchmarks"]:
            stored = benchmark["extra_info"]["ddpperf"]
            spec = stored["spec"]
            if benchmark["name"].startswith(TOGETHER) and spec.get("form") in CAPTURED_FORMS and spec not in shown:
                cells.setdefault(benchmark["name"], []).append(stored)
                shown.append(spec)
    rows = ["| cell | median | least to most | runs | efficiency | CPU a step |", "|---|---|---|---|---|---|"]
    for name, runs in cells.items():
        measured = [Measured.from_json(stored) for stored in runs]
        seconds = [median(each.all_step_seconds()) for each in measured]
        spread = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
        efficiencies = [run["metrics"]["efficiency"]["value"] for run in runs if "efficiency" in run["metrics"]]
        efficiency = f"{median(efficiencies):.1%}" if efficiencies else "-"
        cpu_seconds = [value for each in measured for value in each.counter("cpu_seconds").values()]
        cpu = format_seconds(median(cpu_seconds)) if cpu_seconds else "-"
        rows.append(f"| {name} | {format_seconds(median(seconds))} | {spread} | {len(runs)} | {efficiency} | {cpu} |")
    return "\n".join([*rows, ""])


def versus(run: str, folder: str) -> str:
    """A table of a run's all_reduces beside those that nccl-tests measured on the same machine: FOLDER has its output for N
    GPUs as N.txt (`all_reduce_perf -b 1K -e 1G -f 4 -t N -g 1 -a 3`), of which the times in place are taken."""
    document = json.loads((ROOT / run).read_text())
    rows = ["| size | GPUs | here | nccl-tests | ratio | difference |", "|---|---|---|---|---|---|"]
    for benchmark in document["benchmarks"]:
        measured = Measured.from_json(benchmark["extra_info"]["ddpperf"])
        if is_plain(spec := measured.spec):
            theirs = median(in_place(ROOT / folder / f"{spec.world_size}.txt")[spec.nbytes])
            ours = median(measured.all_step_seconds())
            cells = (format_seconds(ours), format_seconds(theirs), f"{ours / theirs:.3f}", f"{(ours - theirs) * 1e6:+.1f} us")
            rows.append(f"| {format_bytes(spec.nbytes)} | {spec.world_size} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def is_plain(spec: Spec) -> TypeGuard[AllReduceSpec]:
    """Whether it is an all_reduce as nccl-tests measures them."""
    return isinstance(spec, AllReduceSpec) and spec.algorithm == "backend" and spec.form == "eager" and spec.in_place


def in_place(output: Path) -> dict[int, list[float]]:
    """By bytes, the seconds in place of every run of all_reduce_perf whose output the file holds."""
    times: dict[int, list[float]] = {}
    for line in output.read_text().splitlines():
        columns = line.split()
        if len(columns) >= 13 and columns[0].isdecimal():
            times.setdefault(int(columns[0]), []).append(float(columns[9]) / 1e6)
    return times


def folder_of(run: str) -> str:
    return Path(run).parent.name


def draw(document: dict[str, Any], picture: Path) -> None:
    """Speedup over world size beside bus bandwidth over size."""
    from matplotlib import pyplot as plt

    stored = {benchmark["name"]: benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    scaling = [each for name, each in stored.items() if name.startswith("test_weak_scaling[")]
    training = [each for each in scaling if each["spec"]["strategy"] in ("single", "ddp")]
    model, form = training[0]["spec"]["model"], training[0]["spec"]["form"]
    training = [each for each in training if (each["spec"]["model"], each["spec"]["form"]) == (model, form)]
    sizes = sorted({each["spec"]["world_size"] for each in training})
    left.plot(sizes, sizes, color="0.7", linestyle="--", label="linear")
    for batch_size in sorted({each["spec"]["per_rank_batch_size"] for each in training}):
        points = sorted(
            (each["spec"]["world_size"], each["metrics"].get("speedup", {"value": 1.0})["value"])
            for each in training
            if each["spec"]["per_rank_batch_size"] == batch_size
        )
        left.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch_size} a device")
    left.set(xlabel="devices", ylabel="weak speedup", xticks=sizes, title=f"Training step of {model}, DDP, {form}")
    left.legend()
    reducing = [each for each in stored.values() if is_plain(Measured.from_json(each).spec)]
    for world_size in sorted({each["spec"]["world_size"] for each in reducing}):
        points = sorted(
            (each["spec"]["nbytes"], each["metrics"]["busbw_bytes_per_second"]["value"] / 1e9)
            for each in reducing
            if each["spec"]["world_size"] == world_size
        )
        right.plot(*zip(*points, strict=True), marker="o", label=f"{world_size} devices")
    right.set_xscale("log", base=2)
    sizes = sorted({each["spec"]["nbytes"] for each in reducing})
    right.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=30)
    right.set(xlabel="size", ylabel="bus bandwidth, GB/s", title="all_reduce of the backend, eager")
    right.legend()
    figure.suptitle(f"{document['ddpperf']['hardware_key']}, torch {document['ddpperf']['environment']['torch']}")
    figure.savefig(picture, dpi=110)


def main() -> None:
    given = {folder_of(run): run for run in (Path(run).resolve().relative_to(ROOT).as_posix() for run in sys.argv[1:])}
    for page in PAGES:
        page.write_text(updated(page.read_text(), {} if page in OF_ONE_FILE else given))
    pictured, *_ = MADE.findall(PICTURED.read_text())
    draw(json.loads((ROOT / pictured).read_text()), PICTURE)


if __name__ == "__main__":
    main()
