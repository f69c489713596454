"""Run this repository's experiments on several nodes, each a network namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.namespaces import INTERFACE, nodes
from tests.project import REPOSITORY, UNWANTED

AGENT_SECONDS = 20
UNDISTURBED = ("chrt", "--rr", "1")  # before other processes of the machine, and after the switch


def run_on_nodes(
    folder: Path,
    words: Sequence[str],
    *,
    count: int,
    node_size: int,
    seconds: float,
    before: Sequence[str] = (),
    launched: bool = False,
    **link: float,
) -> tuple[dict[str, Any], str]:
    """Run pytest with `words` on nodes with a link, and return the stored run and its output.

    `folder` gets the key and the stored run. `before` stands before each command. `link` has the
    fields of `tests.namespaces.nodes`.
    """
    key, report = folder / "node.key", folder / "run.json"
    options = [f"--nodes={count}", f"--node-size={node_size}", f"--interface={INTERFACE}"]
    options += [f"--benchmark-json={report}"]
    options += [] if launched else [f"--node-key={key}"]
    python = [*before, sys.executable, "-m"]
    with nodes(count, **link) as made:
        join = ["ddpperf.node", "--join", f"{made.addresses[0]}:29511", "--key", str(key)]
        if launched:
            options += ["--launcher", made.launcher]
        commands = [[*python, "pytest", *words, *options]]
        commands += [[*python, *join, "--name", f"node{node}"] for node in range(1, 1 if launched else count)]
        variables = {key: value for key, value in os.environ.items() if not key.startswith(UNWANTED)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started = [
            made.start(node, command, cwd=REPOSITORY, env=variables, **pipes)
            for node, command in enumerate(commands)
        ]
        output, _ = started[0].communicate(timeout=seconds)
        assert started[0].returncode == 0, output
        for agent in started[1:]:
            said, _ = agent.communicate(timeout=AGENT_SECONDS)
            assert agent.returncode == 0, said
            assert said.endswith("ddpperf.node: the run has ended\n")
    return json.loads(report.read_text()), output
