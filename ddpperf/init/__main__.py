"""Write a first performance test into the repository in the current folder.

    python -m ddpperf.init

The command writes an example experiment to perf/, and a conftest.py that loads ddpperf's plugin. It
never changes a file that exists, except that it adds a line to .gitignore.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddpperf.command import Parser, refused
from ddpperf.errors import Refused

TEMPLATE = Path(__file__).parent / "template"
FILES = ("perf/step.py", "perf/test_step.py", "perf/thresholds.toml")
CONFTEST = "conftest.py"
PLUGIN = "ddpperf.plugin"
IGNORED = ".ddpperf/"


def write(root: Path) -> list[str]:
    """Write the example experiment below a folder, and return a line for each file and the next step.

    Raises Refused if one of the example's files exists already. Then nothing is written.
    """
    if existing := [name for name in FILES if (root / name).exists()]:
        raise Refused(
            f"{root / existing[0]} exists already, so nothing was written; "
            "move the file away, or run the command in another folder"
        )
    lines = [_copy(root, name) for name in FILES]
    next_step = "run it: python -m pytest perf/"
    conftest = root / CONFTEST
    if not conftest.exists():
        lines.append(_copy(root, CONFTEST))
    elif PLUGIN not in conftest.read_text(encoding="utf-8", errors="replace"):
        line = (TEMPLATE / CONFTEST).read_text().strip()
        next_step = f"add this line to {CONFTEST}: {line}; then {next_step}"
    ignore = root / ".gitignore"
    ignored = ignore.read_text(encoding="utf-8", errors="replace") if ignore.exists() else ""
    if IGNORED not in ignored.splitlines():
        with ignore.open("a", encoding="utf-8") as file:
            file.write("\n" * bool(ignored and not ignored.endswith("\n")) + f"{IGNORED}\n")
        lines.append(f"added {IGNORED} to .gitignore")
    return [*lines, f"next: {next_step}"]


def _copy(root: Path, name: str) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes((TEMPLATE / name).read_bytes())
    return f"wrote {name}"


def main() -> int:
    Parser("ddpperf.init", __doc__).parse_args()
    try:
        print("\n".join(write(Path.cwd())))
    except Refused as problem:
        return refused(problem)
    except OSError as error:
        return refused(f"{error.filename} cannot be written ({error.strerror}); make it writable")
    return 0


if __name__ == "__main__":
    sys.exit(main())
