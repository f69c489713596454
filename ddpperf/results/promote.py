"""Make a stored run a baseline, with which later runs are compared.

    python -m ddpperf.results.promote [RUN.json] [--name NAME]

Without RUN.json, the newest run of this project is promoted. The command prints the new file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.results.stored_runs import NoBaseline, Storage, is_baseline, newest_run, read_document


def promote(root: Path, run: Path | None = None, name: str = "baseline") -> Path:
    """Copy a stored run into the baselines of its hardware, and return the new file.

    `root` is the project's root. Raises NoBaseline if there is no run, if a test of the run failed,
    or if the run lacks a test of the newest baseline, because later runs read only the newest one.
    """
    run = run or newest_run(root)
    document = read_document(run)
    storage = Storage(root=root, hardware_key=document["ddpperf"]["hardware_key"])
    measured = storage.read(document, run).measured
    if not is_baseline(document):
        raise NoBaseline(
            f"{run} cannot become a baseline: its verdict is FAIL, a control failed, a test looks worse, "
            "was not measured or was delayed, or the file is damaged; name another run"
        )
    newest = storage.newest_baseline()
    if newest and (lacking := newest.measured.keys() - measured.keys()):
        tests = len(newest.measured)
        raise NoBaseline(
            f"{run} measured {tests - len(lacking)} of the {tests} tests of the baseline {newest.path.name}, "
            "and the others would be forgotten; promote a run of all tests, or store this one with "
            "--benchmark-save=NAME"
        )
    return storage.promote(document, name)


def main() -> int:
    parser = Parser("ddpperf.results.promote", __doc__)
    parser.add_argument("run", nargs="?", type=Path, help="a stored run; the newest by default")
    parser.add_argument("--name", default="baseline", help="the baseline's name")
    parser.add_argument("--root", default=Path(), type=Path, help="the project; this folder by default")
    given = parser.parse_args()
    try:
        print_lines([str(promote(given.root, given.run, given.name).relative_to(given.root))])
    except (NoBaseline, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
