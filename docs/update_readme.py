"""Make the README's table and picture from a stored run: python docs/update_readme.py [perf/baselines/KEY/NNNN_NAME.json]

Nothing in them is typed by hand; tests/test_readme.py checks that the README is what this makes of the run that it names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ddpperf.report.summary import summary_lines
from ddpperf.specs import format_bytes

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "overview.png"
BLOCK = re.compile(r"(<!-- made by docs/update_readme.py from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def block(run: str) -> str:
    """The README's table of the stored run at `run`, a path below the root."""
    document = json.loads((ROOT / run).read_text())
    return "\n".join(["```text", *summary_lines(document), "```", ""])


def updated(readme: str, run: str) -> str:
    """The README's text with its block made from `run`."""
    return BLOCK.sub(lambda _: f"<!-- made by docs/update_readme.py from {run} -->\n{block(run)}<!-- end -->", readme)


def draw(document: dict[str, Any], picture: Path) -> None:
    """Speedup over world size beside bus bandwidth over size."""
    from matplotlib import pyplot as plt

    ours = [benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    training = [
        benchmark["extra_info"]["ddpperf"]
        for benchmark in document["benchmarks"]
        if benchmark["name"].startswith("test_weak_scaling[")
    ]
    sizes = sorted({each["spec"]["world_size"] for each in training})
    left.plot(sizes, sizes, color="0.7", linestyle="--", label="linear")
    for batch_size in sorted({each["spec"]["per_rank_batch_size"] for each in training}):
        points = sorted(
            (each["spec"]["world_size"], each["metrics"].get("speedup", {"value": 1.0})["value"])
            for each in training
            if each["spec"]["per_rank_batch_size"] == batch_size
        )
        left.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch_size} a device")
    left.set(xlabel="devices", ylabel="weak speedup", xticks=sizes, title="Training step of ResNet-18, eager DDP, fp32")
    left.legend()
    reducing = [each for each in ours if each["spec"]["measurement"] == "all_reduce"]
    for world_size in sorted({each["spec"]["world_size"] for each in reducing}):
        points = sorted(
            (each["spec"]["nbytes"], each["metrics"]["busbw_bytes_per_second"]["value"] / 1e9)
            for each in reducing
            if each["spec"]["world_size"] == world_size
        )
        right.plot(*zip(*points, strict=True), marker="o", label=f"{world_size} devices")
    right.set_xscale("log", base=2)
    sizes = sorted({each["spec"]["nbytes"] for each in reducing})
    right.set_xticks(sizes, [format_bytes(size) for size in sizes])
    right.set(xlabel="size", ylabel="bus bandwidth, GB/s", title="all_reduce of the backend, eager")
    right.legend()
    figure.suptitle(f"{document['ddpperf']['hardware_key']}, torch {document['ddpperf']['environment']['torch']}")
    figure.savefig(picture, dpi=110)


def main() -> None:
    readme = ROOT / "README.md"
    named = BLOCK.search(readme.read_text())
    assert named is not None, "the README has no block to fill"
    run = Path(sys.argv[1]).resolve().relative_to(ROOT).as_posix() if sys.argv[1:] else named[2]
    readme.write_text(updated(readme.read_text(), run))
    draw(json.loads((ROOT / run).read_text()), PICTURE)


if __name__ == "__main__":
    main()
