"""Show how the time of each test changed over the stored runs of this machine.

    python -m ddpperf.history [TEST]

TEST is a part of the names of the tests to show. The machine is that of the newest stored run. Each
test has a line with its times, and a line for each change with its interval, and the command that finds
the commit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.history.lines import history_lines
from ddpperf.history.past_runs import machine_settings, past_runs, this_machine
from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.results.stored_runs import NoBaseline


def main() -> int:
    parser = Parser("ddpperf.history", __doc__)
    parser.add_argument("test", nargs="?", default="", help="a part of the names of the tests to show")
    given = parser.parse_args()
    try:
        storage = this_machine(Path.cwd())
        runs, damaged = past_runs(storage)
        lines = history_lines(runs, machine_settings(storage), given.test, damaged)
        print_lines([f"history of {storage.hardware_key}: {lines[0]}", *lines[1:]])
    except (NoBaseline, Refused, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
