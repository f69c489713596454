"""Makes the tables of README.md and docs/, and docs/overview.png, from stored test runs.

    python -m tools.update_readme [perf/baselines/KEY/NNNN_NAME.json ...]

tests/unit/test_readme.py checks that the tables are up to date. A stored run that is named on the
command line replaces the run of the same hardware in README.md and docs/. The picture always shows
docs/h100x4/picture.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, Spec, format_bytes
from tools.node_tables import node_calls_table, node_links_table, node_scaling_table
from tools.report_figures import figures_list, terms_table
from tools.report_mistakes import (
    accuracies_table,
    bandwidths_table,
    busy_table,
    clocks_table,
    communications_table,
    data_parallel_table,
    efficiencies_table,
    epoch_ends_table,
    first_epochs_table,
    formulas_table,
    laws_table,
    mistakes_table,
    precisions_table,
    shards_table,
    speedups_table,
)
from tools.tables import (
    ROOT,
    algorithms_table,
    baselines_table,
    batches_table,
    block,
    findings_table,
    gate_table,
    is_plain,
    over_runs,
    projections_table,
    recipes_table,
    trials_table,
    versus,
)

DOCS = ROOT / "docs"
# Pages with stored runs of single files of perf/. A whole test run does not replace these runs.
OF_ONE_FILE = tuple(
    DOCS / f"{page}.md" for page in ("h100x2", "h100x4", "h200x2", "large_batches", "all_reduce", "nodes")
)
OTHERS = tuple(
    DOCS / f"{page}.md" for page in ("cpu2", "images", "gate", "own_ddp", "experiments", "reports", "h200x4")
)
PAGES = (ROOT / "README.md", ROOT / "perf" / "baselines" / "README.md", *OTHERS, *OF_ONE_FILE)
PICTURED = DOCS / "h100x4" / "picture.json"  # a run of the part "picture" of tools/several_gpus.py
PICTURE = DOCS / "overview.png"
MADE = re.compile(r"<!-- made by tools/update_readme.py from (.+?) -->\n.*?<!-- end -->", re.DOTALL)
FIRST = "the first tests in "  # one test of each file
ALL_RUNS = "all runs in "  # the files of a pattern
# The function that makes a table, by the first words of its source. Any other source is a stored run,
# or a stored run and a folder with the output of nccl-tests.
TABLES: dict[str, Callable[[str], str]] = {
    ALL_RUNS: over_runs,
    "the gate in ": gate_table,  # an A/B run with equal sides
    "the findings in ": findings_table,  # an A/B run
    "the recipes in ": recipes_table,  # a run of test_large_batch or test_long_run
    "the remedies in ": partial(recipes_table, tests=("test_remedies",)),
    "the trainings of reports in ": partial(recipes_table, tests=("test_report_training",)),
    "the batches in ": batches_table,  # a run of test_largest_batch
    "the all_reduces in ": algorithms_table,
    "the trials in ": trials_table,  # a folder
    "the projections in ": projections_table,
    "the calls on nodes in ": node_calls_table,
    "the links of nodes in ": node_links_table,
    "the scaling over nodes in ": node_scaling_table,
    "the baselines in ": baselines_table,  # a folder
    "the figures in ": figures_list,  # perf/reports.toml
    "the terms in ": terms_table,  # perf/reports.toml
    "the speedups in ": speedups_table,
    "the efficiencies in ": efficiencies_table,  # the files of a pattern
    "the ends of epochs in ": epoch_ends_table,
    "the laws in ": laws_table,
    "the busy GPUs in ": busy_table,
    "the communication in ": communications_table,
    "the bandwidths in ": bandwidths_table,
    "the formulas in ": formulas_table,
    "the DataParallel steps in ": data_parallel_table,
    "the precisions in ": precisions_table,
    "the accuracies in ": accuracies_table,
    "the shards in ": shards_table,
    "the changed trainings in ": mistakes_table,
    "the clocks in ": clocks_table,  # a folder with results of tools/plain_timing.py
    "the first epochs in ": first_epochs_table,  # the same folder
}


def updated(readme: str, runs: Mapping[str, str]) -> str:
    """Return the text of a Markdown page with all generated tables made again.

    runs: for a hardware key, the file of the stored run that replaces the page's run.
    """

    def made(found: re.Match[str]) -> str:
        source = found[1]
        if kind := next((kind for kind in TABLES if source.startswith(kind)), ""):
            table = TABLES[kind](source.removeprefix(kind))
        else:
            first = FIRST if source.startswith(FIRST) else ""
            run, both, folder = source.removeprefix(first).partition(" and ")
            run = runs.get(folder_of(run), run)
            source = first + run + both + folder
            table = versus(run, folder) if both else block(run, first=bool(first))
        return f"<!-- made by tools/update_readme.py from {source} -->\n{table}<!-- end -->"

    return MADE.sub(made, readme)


def folder_of(run: str) -> str:
    return Path(run).parent.name


def is_pictured(spec: Spec) -> bool:
    return isinstance(spec, AllReduceSpec) and is_plain(spec) and spec.captured


def draw(document: dict[str, Any], picture: Path) -> None:
    """Plot the weak speedup over the number of devices, and the bus bandwidth over the buffer size.

    document: a stored test run. picture: the file to write.
    """
    from matplotlib import pyplot as plt

    stored = {benchmark["name"]: benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    scaling = [found for name, found in stored.items() if name.startswith("test_weak_scaling[")]
    training = [found for found in scaling if found["spec"]["strategy"] in ("single", "ddp")]
    model, execution = training[0]["spec"]["model"], training[0]["spec"]["execution"]
    training = [
        test for test in training if (test["spec"]["model"], test["spec"]["execution"]) == (model, execution)
    ]
    sizes = sorted({test["spec"]["world_size"] for test in training})
    left.plot(sizes, sizes, color="0.7", linestyle="--", label="linear")
    for batch_size in sorted({test["spec"]["per_rank_batch_size"] for test in training}):
        points = sorted(
            (test["spec"]["world_size"], test["metrics"].get("speedup", {"value": 1.0})["value"])
            for test in training
            if test["spec"]["per_rank_batch_size"] == batch_size
        )
        left.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch_size} per device")
    left.set(
        xlabel="devices",
        ylabel="weak speedup",
        xticks=sizes,
        title=f"Training step of {model}, DDP, {execution}",
    )
    left.legend()
    reducing = [test for test in stored.values() if is_pictured(Measured.from_json(test).spec)]
    for world_size in sorted({test["spec"]["world_size"] for test in reducing}):
        points = sorted(
            (test["spec"]["nbytes"], test["metrics"]["busbw_bytes_per_second"]["value"] / 1e9)
            for test in reducing
            if test["spec"]["world_size"] == world_size
        )
        right.plot(*zip(*points, strict=True), marker="o", label=f"{world_size} devices")
    right.set_xscale("log", base=2)
    sizes = sorted({test["spec"]["nbytes"] for test in reducing})
    right.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=30)
    right.set(xlabel="size", ylabel="bus bandwidth, GB/s", title="all_reduce of NCCL, graph")
    right.legend()
    figure.suptitle(
        f"{document['ddpperf']['hardware_key']}, torch {document['ddpperf']['environment']['torch']}"
    )
    figure.savefig(picture, dpi=110)


def main() -> None:
    given = {
        folder_of(run): run
        for run in (Path(run).resolve().relative_to(ROOT).as_posix() for run in sys.argv[1:])
    }
    for page in PAGES:
        page.write_text(updated(page.read_text(), {} if page in OF_ONE_FILE else given))
    draw(json.loads(PICTURED.read_text()), PICTURE)


if __name__ == "__main__":
    main()
