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

UNDISTURBED = ("chrt", "--rr", "1")  # before other processes of the machine, and after the switch


def run_on_nodes(
    folder: Path,
    words: Sequence[str],
    *,
    count: int,
    node_size: int,
    seconds: float,
    before: Sequence[str] = (),
    **link: float,
) -> tuple[dict[str, Any], str]:
    """Run pytest with `words` on nodes with a link, and return the stored run and its output.

    `folder` gets the stored run. `before` stands before each command. `link` has the fields of
    `tests.namespaces.nodes`.
    """
    report = folder / "run.json"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(UNWANTED)}
    with nodes(count, **link) as made:
        options = [f"--nodes={count}", f"--node-size={node_size}", f"--interface={INTERFACE}"]
        launcher = " ".join([made.launcher, *before])
        run = made.start(
            0,
            [
                *(*before, sys.executable, "-m", "pytest", *words, *options),
                *("--launcher", launcher, f"--benchmark-json={report}"),
            ],
            cwd=REPOSITORY,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = run.communicate(timeout=seconds)
    assert run.returncode == 0, output
    return json.loads(report.read_text()), output
