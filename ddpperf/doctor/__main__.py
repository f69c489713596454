"""Say what this machine can measure, and what would spoil its measurements.

    python -m ddpperf.doctor [--json] [--seconds S]

One line for each subject is good, a warning or bad, and says what to do. The exit status is 0 if
nothing is bad, 1 if something is bad, and 4 if the doctor cannot start, as with a wrong option.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ddpperf.doctor.all_checks import all_findings, what_can_be_measured
from ddpperf.doctor.findings import Level, finding_lines
from ddpperf.io.command import Parser, print_lines
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.hardware import hardware_key

SCHEMA = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("ddpperf.doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time limit of the check with two ranks, 10 by default"
    )
    given = parser.parse_args(arguments)
    gpus = visible_gpus()
    findings = all_findings(gpus, given.seconds)
    summary = what_can_be_measured(gpus, findings)
    document = {
        "schema": SCHEMA,
        "hardware_key": hardware_key("cuda" if gpus else "cpu", gpus),
        "summary": summary,
        "findings": [asdict(finding) for finding in findings],
    }
    print_lines([json.dumps(document, indent=2)] if given.json else [*finding_lines(findings), "", summary])
    return int(any(finding.level is Level.BAD for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
