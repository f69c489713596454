"""What the doctor found about one subject, and what to do about it."""

from __future__ import annotations

import enum
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddpperf.results import units

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
    """What the doctor looks at, in the order of its report."""

    GPUS = "GPUs"
    DRIVER = "driver"
    NVLINK = "NVLink"
    PCIE = "PCIe"
    PEERS = "GPU memory"
    GPU_PROCESSES = "GPU load"
    CLOCKS = "GPU clocks"
    THROTTLING = "throttling"
    POWER = "power limit"
    PERSISTENCE = "persistence"
    ECC = "GPU errors"
    MIG = "MIG"
    LOAD = "CPU load"
    CORES = "CPU cores"
    GOVERNOR = "governor"
    TURBO = "turbo"
    BF16 = "bf16"
    MEMORY = "memory"
    HUGE_PAGES = "huge pages"
    SHARED_MEMORY = "/dev/shm"
    FILES = "open files"
    HOME = "home"
    TEMPORARY = "temp folder"
    PROJECT = "this folder"
    LOOPBACK = "127.0.0.1"
    LIBRARIES = "libraries"
    COMPILER = "compiler"
    PYTHON = "Python"
    TORCH = "torch"
    TORCHVISION = "torchvision"
    NCCL = "NCCL"
    SMOKE = "two ranks"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found about a subject.

    advice: what to do, which only good findings lack. late: whether the check did not end in time, so
    that the subject may be good.
    """

    subject: Subject
    level: Level
    text: str
    advice: str = ""
    late: bool = False

    def __post_init__(self) -> None:
        if bool(self.advice) == (self.level is Level.GOOD):
            raise ValueError(f"{self.subject} is {self.level}, with the advice {self.advice!r}")


def good(subject: Subject, text: str) -> Finding:
    return Finding(subject=subject, level=Level.GOOD, text=text)


def warn(subject: Subject, text: str, advice: str) -> Finding:
    return Finding(subject=subject, level=Level.WARNING, text=text, advice=advice)


def late(subject: Subject, text: str) -> Finding:
    return Finding(subject=subject, level=Level.WARNING, text=text, advice=LATE, late=True)


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


def sentence_lines(sentence: str) -> list[str]:
    """Return a sentence in lines of at most WIDTH."""
    return textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)


def counted_levels(findings: Sequence[Finding]) -> str:
    """Return a sentence with the numbers of warnings and of bad findings."""
    counts = Counter(finding.level for finding in findings)
    warnings = units.counted(counts[Level.WARNING], "warning") if counts[Level.WARNING] else "no warning"
    return f"Found {warnings} and {counts[Level.BAD]} bad." if counts[Level.BAD] else f"Found {warnings}."
