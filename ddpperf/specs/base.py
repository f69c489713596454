"""What every spec has: the ranks it needs, a delay, a fault. And the checks of a spec's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

FaultKind = Literal["raise", "hang", "kill", "exit"]
FaultCommand = Literal["open", "sample", "close"]
MOST_DELAY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does instead of its work, so that fault handling can be tested.

    kind: "raise" an exception, "hang" for ever, "kill" itself with SIGKILL, "exit" with status 0.
    command: the command of a measurement at which the fault happens.
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
    """The fields and properties of every spec.

    measurement: the name by which the ranks find the measurement.
    repeats: whether a round has an untimed step and then many timed ones; else it is one long step.
    counts: whether a measurement counts instead of timing, so that one round is enough.
    compared_parts: the parts into which an A/B run cuts a round; the sets take turns part by part,
    so that a short disturbance of the machine hits both sides.
    delay_seconds: a delay added to each step, on the GPU if there is one, to test thresholds.
    """

    measurement: ClassVar[str]
    repeats: ClassVar[bool] = True
    counts: ClassVar[bool] = False
    compared_parts: ClassVar[int] = 1
    seed: ClassVar[int] = 0
    set_epoch: ClassVar[bool] = True  # whether each epoch is shuffled differently

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
        """Whether the GPUs map each other's buffers (symmetric memory)."""
        return False

    @property
    def captured(self) -> bool:
        """Whether the work is replayed from a CUDA graph."""
        return False

    @property
    def calls(self) -> int:
        """The number of measured calls in a step; a sample's seconds are those of one call."""
        return 1

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles a part of the work."""
        return False

    @property
    def busy_processes(self) -> int:
        """The number of processes that compute at the same time."""
        return max(map(len, self.turns(self.world_size)))

    def turns(self, size: int) -> list[list[int]]:
        """Return which ranks of a process set with `size` ranks work together, turn after turn."""
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
