"""The results of the doctor's checks, each with advice on what to do."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 110  # characters of a line
LATE = "free the machine, or pass --seconds 60"  # advice, also for a first start from a slow disk


class Level(enum.StrEnum):
    """How a finding matters for measurements.

    WARNING: measurements will be noisy, or a part of them cannot run. BAD: no valid measurement can
    be made, or none on the hardware that the machine has.
    """

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class Subject(enum.StrEnum):
    """The subjects that the doctor checks, in the order of its report."""

    GPUS = "GPUs"
    LINKS = "GPU links"
    GPU_LOAD = "GPU load"
    CLOCKS = "GPU clocks"
    POWER = "GPU power"
    CPU_LOAD = "CPU load"
    CORES = "CPU cores"
    GOVERNOR = "governor"
    MEMORY = "memory"
    SHARED_MEMORY = "/dev/shm"
    HUGE_PAGES = "huge pages"
    GIT = "git"
    VARIABLES = "variables"
    TORCH = "torch"
    TORCHVISION = "torchvision"
    COMPILER = "compiler"
    TWO_RANKS = "two ranks"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check of the doctor. advice: what to do; empty only if the result is good."""

    subject: Subject
    level: Level
    text: str
    advice: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> Finding:
        """Read what `asdict` made of a finding."""
        return cls(
            subject=Subject(fields["subject"]),
            level=Level(fields["level"]),
            text=fields["text"],
            advice=fields["advice"],
        )

    @property
    def badness(self) -> int:
        """The place of the level among all levels; 0 is good."""
        return list(Level).index(self.level)


def good(subject: Subject, text: str) -> Finding:
    return Finding(subject=subject, level=Level.GOOD, text=text)


def warn(subject: Subject, text: str, advice: str) -> Finding:
    return Finding(subject=subject, level=Level.WARNING, text=text, advice=advice)


def bad(subject: Subject, text: str, advice: str) -> Finding:
    return Finding(subject=subject, level=Level.BAD, text=text, advice=advice)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each finding, and more only if it is longer than WIDTH."""
    subject_width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        first = f"{finding.level:<{len(Level.WARNING)}}  {finding.subject:<{subject_width}}  "
        text = "; ".join(filter(None, (finding.text, finding.advice)))
        lines += textwrap.wrap(
            " ".join(text.split()),
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_on_hyphens=False,
        )
    return lines
