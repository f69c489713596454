"""Show how the time of each test changed over the stored runs of this machine.

    python -m ddpperf.history [TEST]

TEST is a part of the names of the tests to show. Each test has a line with its times, and a line for
each change with its 95% interval and the command that finds the commit.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.history.lines import history_lines
from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.hardware import hardware_key
from ddpperf.results.stored_runs import NoBaseline, newest_run


def main() -> int:
    parser = Parser("ddpperf.history", __doc__)
    parser.add_argument("test", nargs="?", default="", help="a part of the names of the tests to show")
    given = parser.parse_args()
    key = hardware_key("cuda" if (gpus := visible_gpus()) else "cpu", gpus)
    with contextlib.suppress(NoBaseline):  # there are only baselines
        key = newest_run(Path.cwd()).parent.name
    try:
        print_lines(history_lines(Path.cwd(), key, given.test))
    except (Refused, OSError) as problem:
        return refused(problem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
