"""Run a module of the doctor as a program, which may crash or hang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from ddpperf.errors import MAX_LETTERS
from ddpperf.machine.child_process import describe_status, package_path, run_child


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a program printed as JSON.

    problem: how it ended and the last line of its errors, empty if it came to its end. late: whether
    its time was over.
    """

    facts: dict[str, Any]
    problem: str = ""
    late: bool = False


def run_program(module: str, *arguments: str, seconds: float) -> Report:
    """Run a module as a program, and return the facts that it printed, one JSON object in a line."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        ended = run_child(command, {"PYTHONPATH": package_path()}, seconds)
    except OSError as error:
        return Report(facts={}, problem=f"could not be started ({error.strerror})")
    except subprocess.TimeoutExpired as error:
        return Report(
            facts=_facts(str(error.output)), problem=f"did not end within {seconds:.0f} s", late=True
        )
    last = [line.strip()[:MAX_LETTERS] for line in ended.stderr.strip().splitlines()[-1:]]
    problem = ": ".join([describe_status(ended.returncode), *last]) if ended.returncode else ""
    return Report(facts=_facts(ended.stdout), problem=problem)


def _facts(output: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(TypeError, ValueError):  # what a library printed
            facts.update(json.loads(line))
    return facts
