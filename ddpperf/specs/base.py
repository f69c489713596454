"""What every spec has: the ranks it needs, a slow-down, a fault; and the checks of a spec's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

FaultKind = Literal["raise", "hang", "kill", "exit"]
FaultCommand = Literal["open", "sample", "close"]
MOST_DELAY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does instead of its work, so that the handling of it can be tested.

    kind: "raise" an exception, "hang" for ever, "kill" itself with SIGKILL, "exit" with status 0.
    command: the command of a measurement at which it happens.
    """

    kind: FaultKind
    rank: int
    command: FaultCommand = "sample"

    def __post_init__(self) -> None:
        require_one_of("fault kind", self.kind, get_args(FaultKind))
        require_one_of("fault command", self.command, get_args(FaultCommand))
        require_at_least("fault rank", self.rank, 0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every spec has; `Spec` names those that there are.

    delay_seconds: a slow-down put into every step, on the device where that is a GPU: what a threshold must notice.
    """

    measurement: ClassVar[str]
    repeats: ClassVar[bool] = True  # whether a round is many steps after an untimed one, or one long whole
    counts: ClassVar[bool] = False  # whether one round says all
    compared_parts: ClassVar[int] = (
        1  # of a round, each on all sets in turn where two sides are compared: a burst meets both
    )
    seed: ClassVar[int] = 0  # of what is drawn
    set_epoch: ClassVar[bool] = True  # whether each epoch has an order of its own

    world_size: int
    delay_seconds: float = 0.0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        require_delay("delay_seconds", self.delay_seconds)

    @property
    def grouped(self) -> bool:
        """Whether the ranks form a process group."""
        return True

    @property
    def maps_memory(self) -> bool:
        """Whether the ranks' GPUs have each other's buffers mapped."""
        return False

    @property
    def captured(self) -> bool:
        """Whether the work is replayed from a graph, so that the CPU has hardly a part in it."""
        return False

    @property
    def calls(self) -> int:
        """How many calls of what is measured a step is; its seconds are one's."""
        return 1

    @property
    def compiled(self) -> bool:
        """Whether torch compiles a part of it."""
        return False

    @property
    def busy_processes(self) -> int:
        """How many processes compute at the same time."""
        return max(map(len, self.turns(self.world_size)))

    def turns(self, size: int) -> list[list[int]]:
        """Of a set of `size` ranks, those that work at the same time, turn after turn."""
        del size
        return [list(range(self.world_size))]


def require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def require_number(name: str, value: object, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, got {value!r}")


def require_delay(name: str, delay: object) -> None:
    require_number(name, delay, MOST_DELAY_SECONDS)


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")


def require_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
