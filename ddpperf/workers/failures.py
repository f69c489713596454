"""Failures of ranks, and the exception for a process set, which names the likeliest cause first."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ddpperf.io.terminal_text import harmless, shortened


class Cause(enum.IntEnum):
    """Why a rank did not answer a command.

    The smallest value is the likeliest cause of other failures. A rank that dies breaks the
    collective calls of the other ranks. A rank that raises an exception leaves the other ranks
    waiting.
    """

    DIED = 1
    RAISED = 2
    RAISED_DISTRIBUTED = 3  # an error of torch.distributed, gloo or NCCL
    HUNG = 4


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The cause and the details of one rank's failure.

    what: the end of a sentence that begins with the rank. detail: the rank's traceback, log or
    stacks. where: " on node b" for a launched rank. limit: whether the rank may simply
    have needed too much memory or too large indices.
    """

    rank: int
    cause: Cause
    what: str
    detail: str = ""
    where: str = ""
    limit: bool = False


class SetFailure(Exception):
    """Raised if ranks of a process set fail.

    The message names the first cause, its rank and the rank's traceback. failures: in the order in
    which they were noticed: a launcher that kills the other ranks does so after the first death.
    """

    def __init__(self, set_name: str, doing: str, failures: Sequence[RankFailure]) -> None:
        self.set_name = set_name
        self.failures = tuple(sorted(failures, key=lambda failure: failure.cause))
        first = self.failures[0]
        count = len(self.failures) if first.cause is Cause.HUNG else 1  # all may wait for one of them
        ranks = ", ".join(f"{failure.rank}{failure.where}" for failure in self.failures[:count])
        lines = [f"rank{'s' * (count > 1)} {ranks} of set {set_name} {first.what} ({doing})"]
        lines += [failure.detail for failure in self.failures[:count]]
        others = self.failures[count:]
        lines += [f"after it, rank {failure.rank}{failure.where} {failure.what}" for failure in others]
        texts = (shortened(line.rstrip()) for line in lines if line.strip())
        super().__init__(harmless("\n".join(texts)))
