"""Write a first performance test into the repository in the current folder.

    python -m ddpperf.init

The command writes an example experiment to perf/, and a conftest.py that loads ddpperf's plugin. It
never changes a file that exists, except that it adds a line to .gitignore.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.io.files import write_atomically

TEMPLATE = Path(__file__).parent / "template"
FILES = ("perf/step.py", "perf/test_step.py", "perf/thresholds.toml")
CONFTEST = "conftest.py"
PLUGIN_LINE = r"^pytest_plugins\b.*?ddpperf\.plugin"
IGNORED = ".ddpperf/"


def write(root: Path) -> list[str]:
    """Write the example experiment below a folder, and return a line for each file and the next step.

    Raises Refused if one of the example's files exists already, or if a file cannot be read or
    written.
    """
    files = {root / name: (TEMPLATE / name).read_bytes() for name in FILES}
    if existing := [path for path in files if os.path.lexists(path)]:
        raise Refused(
            f"{existing[0]} exists already, so nothing was written; "
            "move the file away, or run the command in another folder"
        )
    next_step = "run it: python -m pytest perf/"
    line = (TEMPLATE / CONFTEST).read_text(encoding="utf-8").strip()
    if not os.path.lexists(root / CONFTEST):
        files[root / CONFTEST] = (TEMPLATE / CONFTEST).read_bytes()
    elif not re.search(PLUGIN_LINE, _text(root / CONFTEST), re.MULTILINE | re.DOTALL):
        next_step = f"add this line to {CONFTEST}: {line}; then {next_step}"
    ignore = root / ".gitignore"
    ignored = _text(ignore) if os.path.lexists(ignore) else ""
    lines = [f"wrote {path.relative_to(root)}" for path in files]
    if IGNORED not in ignored.splitlines():
        newline = "" if ignored == "" or ignored.endswith("\n") else "\n"
        text = f"{ignored}{newline}{IGNORED}\n"
        files[ignore.resolve()] = text.encode(errors="surrogateescape")
        lines.append(f"added {IGNORED} to .gitignore")
    for path, content in files.items():
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise Refused(f"{path} cannot be written ({error.strerror}); make it writable") from error
    return [*lines, f"next: {next_step}"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}); repair it first") from error


def main() -> int:
    Parser("ddpperf.init", __doc__).parse_args()
    try:
        print_lines(write(Path.cwd()))
    except (Refused, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
