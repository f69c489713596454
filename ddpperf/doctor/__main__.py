"""Say what this machine can measure, and what would spoil its measurements.

    python -m ddpperf.doctor [--json] [--seconds S]

One line for each subject is good, a warning or bad, and says what to do. The exit status is 0 if
nothing is bad, 1 if something is bad, and 4 if the doctor cannot start, as with a wrong option.
"""

from __future__ import annotations

import sys

try:
    import json
    from collections.abc import Sequence
    from dataclasses import asdict

    from ddpperf.doctor.examination import all_findings, what_can_be_measured
    from ddpperf.doctor.findings import Level, finding_lines
    from ddpperf.io.command import Parser, print_lines, refused
    from ddpperf.machine.hardware import hardware_key, visible_gpus
except Exception as error:  # a file random.py of this folder replaces Python's module
    problem = f"the doctor cannot be imported ({error})"
    print(f"{problem}; rename the file, or start in another folder", file=sys.stderr)
    sys.exit(4)

SCHEMA = 2
SECONDS = 10.0
LEAST_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("ddpperf.doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="end after so many seconds, 10 by default"
    )
    given = parser.parse_args(arguments)
    if not LEAST_SECONDS <= given.seconds < float("inf"):
        parser.error(f"--seconds takes a number of at least {LEAST_SECONDS:g}, got {given.seconds:g}")
    gpus = visible_gpus()
    findings = all_findings(gpus, given.seconds)
    summary = what_can_be_measured(gpus, findings)
    if given.json:
        document = {
            "schema": SCHEMA,
            "hardware_key": hardware_key("cuda" if gpus else "cpu", gpus),
            "summary": summary,
            "findings": [asdict(finding) for finding in findings],
        }
        lines = [json.dumps(document, indent=2)]
    else:
        lines = [*finding_lines(findings), "", summary]
    try:
        print_lines(lines)
    except OSError as error:
        return refused(f"the output cannot be written ({error.strerror}); make room")
    return int(any(finding.level is Level.BAD for finding in findings))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports Ctrl-C
