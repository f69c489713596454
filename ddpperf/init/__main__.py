"""Write a first performance test into the repository in the current folder.

    python -m ddpperf.init

The command writes an example experiment to perf/, and a conftest.py that loads ddpperf's plugin. It
never changes a file that exists, except that it adds a line to .gitignore.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.io.command import Parser, print_lines, refused

TEMPLATE = Path(__file__).parent / "template"
FILES = ("perf/step.py", "perf/test_step.py", "perf/test_script.py", "perf/thresholds.toml")
CONFTEST = "conftest.py"
PLUGIN_LINE = rb"^pytest_plugins\b.*?ddpperf\.plugin"
IGNORED = ".ddpperf/"


def write(root: Path) -> list[str]:
    """Write the example experiment below a folder, and return a line for each file and the next step.

    Raises Refused if one of the example's files exists already, and OSError if a file cannot be read
    or written.
    """
    if existing := [name for name in FILES if (root / name).exists()]:
        advice = "move the file away, or run the command in another folder"
        raise Refused(f"{root / existing[0]} exists already, so nothing was written; {advice}")
    names, next_step = [*FILES], "run it: python -m pytest perf/"
    if not (conftest := root / CONFTEST).exists():
        names.append(CONFTEST)
    elif not re.search(PLUGIN_LINE, conftest.read_bytes(), re.MULTILINE | re.DOTALL):
        line = (TEMPLATE / CONFTEST).read_text(encoding="utf-8").strip()
        next_step = f"add this line to {CONFTEST}: {line}; then {next_step}"
    (root / "perf").mkdir(exist_ok=True)
    for name in names:
        (root / name).write_bytes((TEMPLATE / name).read_bytes())
    lines = [f"wrote {name}" for name in names]
    ignore = root / ".gitignore"
    ignored = ignore.read_bytes() if ignore.exists() else b""
    if IGNORED.encode() not in ignored.splitlines():
        newline = "" if ignored[-1:] in (b"", b"\n") else "\n"
        with ignore.open("a", encoding="utf-8") as file:
            file.write(f"{newline}{IGNORED}\n")
        lines.append(f"added {IGNORED} to .gitignore")
    return [*lines, f"next: {next_step}"]


def main() -> int:
    Parser("ddpperf.init", __doc__).parse_args()
    try:
        print_lines(write(Path.cwd()))
    except (Refused, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
