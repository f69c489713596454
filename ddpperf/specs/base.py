"""The fields that every measurement spec has, and functions that check the values of fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

FaultKind = Literal["raise", "hang", "kill", "exit"]
FaultCommand = Literal["open", "sample", "close"]
MOST_DELAY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure that one rank causes on purpose, so that the handling of failures can be tested.

    kind: "raise" raises an exception, "hang" waits for ever, "kill" sends SIGKILL to the rank
    itself, and "exit" exits with status 0.
    command: the command sent to the rank ("open", "sample" or "close") that fails.
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
    """Base class of all measurement specs: number of ranks, added delay, and fault to inject.

    measurement: the name by which the ranks find the measurement.
    repeats: whether a round has one untimed step and then many timed steps. If False, a round is
    one long step.
    counts: whether the measurement counts instead of timing, so that one round is enough.
    compared_parts: the number of parts into which an A/B run divides a round. Base and candidate
    take turns after each part, so that a short disturbance of the machine affects both.
    delay_seconds: a delay that is added to each step to test thresholds, on the GPU if there is
    one.
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
        """Return whether the ranks form a torch.distributed process group."""
        return True

    @property
    def maps_memory(self) -> bool:
        """Return whether the GPUs map each other's buffers by torch's symmetric memory."""
        return False

    @property
    def captured(self) -> bool:
        """Return whether a measured step is replayed from a CUDA graph."""
        return False

    @property
    def calls(self) -> int:
        """Return how many collective calls a measured step makes, or 1 for a training step.

        The seconds of a sample are those of one collective call.
        """
        return 1

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile compiles a part of a measured step."""
        return False

    @property
    def busy_processes(self) -> int:
        """Return the number of processes that compute at the same time during the measurement."""
        return max(map(len, self.turns(self.world_size)))

    def turns(self, size: int) -> list[list[int]]:
        """Return the groups of ranks that measure together, in the order in which they take turns.

        size: the number of ranks in the process set.
        """
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
