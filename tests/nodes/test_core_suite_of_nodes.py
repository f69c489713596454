"""The whole core suite on several nodes, each a network namespace with one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import INTERFACE, needs_namespaces, nodes
from tests.project import REPOSITORY, UNWANTED

SUITE_SECONDS = 600


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [2, 4])
def test_core_suite_passes_on_nodes(count: int, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(UNWANTED)}
    options = f"perf/ --rounds=2 --nodes={count} --node-size=1 --interface={INTERFACE}".split()
    with nodes(count) as made:
        options += ["--launcher", made.launcher, f"--benchmark-json={report}"]
        run = made.start(
            0,
            [sys.executable, "-m", "pytest", *options],
            cwd=REPOSITORY,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = run.communicate(timeout=SUITE_SECONDS)
    assert run.returncode == 0, output
    assert "PASS: " in output
    stored = json.loads(report.read_text())
    assert len(stored["ddpperf"]["environment"]["nodes"]) == count
    names = [test["name"] for test in stored["benchmarks"]]
    assert f"test_weak_scaling[{count}x1rank-b32]" in names
