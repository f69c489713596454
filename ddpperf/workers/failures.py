"""What went wrong in a process set, told so that the first cause comes first."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Cause(enum.IntEnum):
    """Why a rank gave no answer, the likeliest root of a set's failure first.

    A rank that dies takes its peers' collectives down with it, and a rank that raises leaves its peers waiting: their
    errors follow from its own.
    """

    DIED = 1
    RAISED = 2
    RAISED_DISTRIBUTED = 3
    HUNG = 4


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank's failure: a sentence's end that says what happened, and what that rank left to read. limit: whether it may be
    that the work was too much for a device or a library, and is no mistake."""

    rank: int
    cause: Cause
    what: str
    detail: str
    limit: bool = False


class SetFailure(Exception):
    """A process set failed and has been killed; the text names the root cause's rank, cause and traceback."""

    def __init__(self, set_name: str, doing: str, failures: Sequence[RankFailure]) -> None:
        first, *others = sorted(failures, key=lambda failure: (failure.cause, failure.rank))
        if first.cause is Cause.HUNG and others:
            ranks = ", ".join(str(failure.rank) for failure in (first, *others))
            lines = [f"ranks {ranks} of set {set_name} {first.what} ({doing})"]
            lines += [failure.detail for failure in (first, *others)]
        else:
            lines = [f"rank {first.rank} of set {set_name} {first.what} ({doing})", first.detail]
            lines += [f"after it, rank {failure.rank} {failure.what}" for failure in others]
        super().__init__("\n".join(line.rstrip() for line in lines if line.strip()))
        self.set_name = set_name
        self.failures = (first, *others)
