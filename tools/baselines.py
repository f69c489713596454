"""A table of the runs that are kept in perf/baselines/."""

from __future__ import annotations

import json
import re
import shlex

from tools.tables import ROOT


def baselines_table(folder: str) -> str:
    """Each run's file, day, commit, number of tests and command; without the options that say where its output goes."""
    rows = ["| run | day | commit | tests | command |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / folder).glob("*/*.json")):
        document = json.loads(path.read_text())
        command = document["ddpperf"]["options"]["command_line"]
        command = re.sub(r"--(verdict|benchmark-json|benchmark-save|traces)[ =]\S+", "", command)
        command = re.sub(
            r"-k ([^'\"].*?)(?= --|$)", lambda found: f"-k {shlex.quote(found[1].strip())}", command
        )  # once kept bare
        command = " ".join(re.sub(r"imagefolder:\S+", "imagefolder:DIR", command).split())
        switched = "NCCL_NVLS_ENABLE=0 " * (document["ddpperf"]["environment"].get("nvls") == "0")
        command = f"`{switched}python3 -m pytest {command}`"
        commit = document["commit_info"]["id"][:9]
        day = document["datetime"][:10]
        rows.append(
            f"| {path.relative_to(ROOT / folder)} | {day} | {commit} | {len(document['benchmarks'])} | {command} |"
        )
    return "\n".join([*rows, ""])
