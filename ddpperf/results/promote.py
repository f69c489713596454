"""Make a stored run a baseline, with which later runs are compared.

    python -m ddpperf.results.promote [RUN.json] [--name NAME]

Without RUN.json, the newest run of this project is promoted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddpperf.command import Parser, refused
from ddpperf.results.stored_runs import NoBaseline, Storage, is_baseline, newest_run, read_document


def promote(root: Path, run: Path | None = None, name: str = "baseline") -> Path:
    """Copy a stored run into the baselines of its hardware, and return the new file.

    `root` is the project's root. Raises NoBaseline if there is no run, or if a test of the run failed.
    """
    run = run or newest_run(root)
    document = read_document(run)
    header = document.get("ddpperf", {}) if isinstance(document, dict) else {}
    storage = Storage(root=root, hardware_key=str(header.get("hardware_key", "")))
    storage.load(run)
    if not is_baseline(document):
        raise NoBaseline(
            f"{run} cannot become a baseline: it is an A/B run, its verdict is FAIL, a control failed, or a "
            "test was not measured or was delayed; name another run"
        )
    return storage.promote(document, name)


def main() -> int:
    parser = Parser("ddpperf.results.promote", __doc__)
    parser.add_argument("run", nargs="?", type=Path, help="a stored run; the newest by default")
    parser.add_argument("--name", default="baseline", help="the baseline's name")
    given = parser.parse_args()
    try:
        print(f"saved the baseline: {os.path.relpath(promote(Path.cwd(), given.run, given.name))}")
    except (NoBaseline, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
