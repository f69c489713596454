"""What can be measured of collectives: one call on a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ddpperf.specs.base import Work, require_at_least, require_bool, require_one_of

OwnAlgorithm = Literal["gather_broadcast", "ring", "recursive_doubling", "halving_doubling", "tree"]
SymmetricAlgorithm = Literal[
    "one_shot", "two_shot", "copy_engine", "low_latency"
]  # in memory that all GPUs have mapped
Algorithm = Literal["backend", SymmetricAlgorithm, OwnAlgorithm]
CollectiveKind = Literal["reduce_scatter", "all_gather", "broadcast", "all_to_all"]
CallExecution = Literal["eager", "graph"]
OWN_ALGORITHMS: tuple[OwnAlgorithm, ...] = get_args(OwnAlgorithm)
SYMMETRIC: tuple[SymmetricAlgorithm, ...] = get_args(SymmetricAlgorithm)
CAPTURED_ALGORITHMS: tuple[Algorithm, ...] = ("backend", *SYMMETRIC)
ONE_KERNEL: tuple[Algorithm, ...] = (
    "backend",
    "one_shot",
    "two_shot",
)  # those that are one kernel of a library's
GRAPH_CALLS = 20  # in one graph, as nccl-tests' -G 20 has
FLOAT32_BYTES = 4
LOW_LATENCY_BYTES = 2**22  # the most of low_latency's buffer: all of it goes to every rank
PIECE_BYTES = 2**20  # of a ring's segment, that travel by themselves
MOST_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class Call(Work):
    """One call on float32 buffers of `nbytes` bytes, by all ranks. form: called by itself, or as one of GRAPH_CALLS in a
    graph; seconds are one call's."""

    nbytes: int
    execution: CallExecution = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("world_size", self.world_size, 2)
        require_at_least("nbytes", self.nbytes, FLOAT32_BYTES)
        require_one_of("execution", self.execution, get_args(CallExecution))
        if self.nbytes % FLOAT32_BYTES:
            raise ValueError(
                f"nbytes must be a multiple of a float32's {FLOAT32_BYTES} bytes, got {self.nbytes}"
            )

    @property
    def captured(self) -> bool:
        return self.execution == "graph"

    @property
    def calls(self) -> int:
        return GRAPH_CALLS if self.captured else 1


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec(Call):
    """A sum over all ranks, by the backend's own all_reduce, by one in memory that all GPUs have mapped, or by one of our
    algorithms on the backend's messages. in_place: into the buffer itself, or into another.

    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "all_reduce"

    algorithm: Algorithm = "backend"
    in_place: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("algorithm", self.algorithm, get_args(Algorithm))
        require_bool("in_place", self.in_place)
        if self.captured and self.algorithm not in CAPTURED_ALGORITHMS:
            raise ValueError(
                f"form graph captures {', '.join(CAPTURED_ALGORITHMS)}, got {self.algorithm}; use eager"
            )
        if self.algorithm == "low_latency" and self.nbytes > LOW_LATENCY_BYTES:
            raise ValueError(
                f"algorithm low_latency sums up to {format_bytes(LOW_LATENCY_BYTES)}, got {self.nbytes} bytes; use two_shot"
            )

    @property
    def maps_memory(self) -> bool:
        return self.algorithm in SYMMETRIC

    @property
    def id(self) -> str:
        place = "" if self.in_place else "-out_of_place"
        return f"world_size={self.world_size}-{format_bytes(self.nbytes)}-{self.algorithm}-{self.execution}{place}"


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec(Call):
    """Another collective of the backend, which FSDP and ZeRO rest on. nbytes: as nccl-tests counts them, of the greater of the
    two buffers of a rank: what a reduce_scatter begins with, what an all_gather puts together.

    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "collective"

    kind: CollectiveKind

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("kind", self.kind, get_args(CollectiveKind))
        share = self.world_size * FLOAT32_BYTES
        if self.kind != "broadcast" and self.nbytes % share:
            raise ValueError(
                f"nbytes must be a multiple of {share}, a float32 for each rank, got {self.nbytes}"
            )

    @property
    def id(self) -> str:
        return f"world_size={self.world_size}-{format_bytes(self.nbytes)}-{self.kind}-{self.execution}"


def ring_pieces(nbytes: float, N: int) -> int:
    """In how many pieces a ring of N ranks sends each of the N segments of its buffer."""
    return min(MOST_PIECES, max(1, int(nbytes // N // PIECE_BYTES)))


def format_bytes(nbytes: int) -> str:
    """A size as test ids spell it: 1 KiB is `1KiB`; sizes that are no whole KiB stay in bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"
