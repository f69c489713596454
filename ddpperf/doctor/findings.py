"""The results of the doctor's checks, each with advice on what to do."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 110  # characters of a line


class Level(enum.StrEnum):
    """How a finding matters for measurements.

    WARNING: measurements will be noisy, or a part of them cannot run. BAD: no valid measurement can
    be made, or none on the hardware that the machine has.
    """

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check of the doctor.

    subject: what was checked; `all_checks.py` adds it. advice: what to do; empty only if the result is
    good.
    """

    subject: str = ""
    level: Level
    text: str
    advice: str = ""


def good(text: str) -> Finding:
    return Finding(level=Level.GOOD, text=text)


def warn(text: str, advice: str) -> Finding:
    return Finding(level=Level.WARNING, text=text, advice=advice)


def bad(text: str, advice: str) -> Finding:
    return Finding(level=Level.BAD, text=text, advice=advice)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each finding, or several lines if the finding is longer than WIDTH."""
    subject_width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        first = f"{finding.level:<{len(Level.WARNING)}}  {finding.subject:<{subject_width}}  "
        text = " ".join(f"{finding.text}; {finding.advice}".removesuffix("; ").split())
        rest = " " * len(first)
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    return lines
