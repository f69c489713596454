"""What differs between the sides of a comparison: commits and files, packages, environment variables."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpperf.io.secret_values import shown_value
from ddpperf.machine.child_process import run_child
from ddpperf.machine.git import NOT_CODE, commit, git
from ddpperf.results.units import counted
from ddpperf.workers.interpreter import Side

MOST_NAMED = 4
LIST_SECONDS = 20.0
LIST = (
    "import json, importlib.metadata as found;"
    " print(json.dumps({one.metadata['Name']: one.version for one in found.distributions()}))"
)


def differences_of(base: Side, candidate: Side, here: Path) -> list[str]:
    """Return a sentence for each kind of difference. here: the source tree of a side without a root."""
    found = []
    before, now = base.root or here, candidate.root or here
    if before.resolve() != now.resolve():
        found.append(f"commits: {_described(before)} -> {_described(now)}{_files(before, now)}")
    if base.python != candidate.python:
        both = _packages(base.python), _packages(candidate.python)
        packages = _changed(*both) if all(both) else ""  # of one side, they are not known
        found.append(f"packages: {packages}" if packages else "")
    variables = (
        {name: shown_value(name, value) for name, value in side.environment.items()}
        for side in (base, candidate)
    )
    found.append(f"variables: {changed}" if (changed := _changed(*variables)) else "")
    return [line for line in found if line]


def _described(root: Path) -> str:
    """Return the commit of a source tree with its subject."""
    try:
        return f'{commit(root)} "{git(root, "log", "-1", "--format=%s")[:60]}"'
    except OSError:
        return commit(root)


def _files(before: Path, now: Path) -> str:
    """Return the code files that differ between two source trees of one repository."""
    try:
        names = git(now, "diff", "--name-only", commit(before).removesuffix("+"), "--", ".", *NOT_CODE)
    except OSError:  # the trees are of different repositories
        return ""
    files = names.split("\n") if names else []
    named = f": {_first(files)}" if files else ""
    return f"; {counted(len(files), 'file')} changed{named}"


def _packages(python: str) -> dict[str, str]:
    """Return the version of each package that an interpreter finds; {} if it cannot say."""
    try:
        ended = run_child([python, "-c", LIST], {}, LIST_SECONDS)
        found: dict[str, str] = json.loads(ended.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return found


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    both = {name: (before.get(name, "(none)"), now.get(name, "(none)")) for name in {**before, **now}}
    return _first([f"{name} {old} -> {new}" for name, (old, new) in both.items() if old != new])


def _first(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
