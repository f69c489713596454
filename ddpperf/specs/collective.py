"""Measurement specs for a collective, such as all_reduce, or a copy of a buffer of a given size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from ddpperf.specs.spec import MOST_RANKS, Positive, Rule, Rules, Spec

OwnAlgorithm = Literal["gather_broadcast", "ring", "recursive_doubling", "halving_doubling", "tree"]
# Algorithms that work in memory which all GPUs of the node have mapped:
SymmetricAlgorithm = Literal["one_shot", "two_shot", "copy_engine", "low_latency"]
Algorithm = Literal["backend", SymmetricAlgorithm, OwnAlgorithm, "hierarchical"]
CollectiveKind = Literal["reduce_scatter", "all_gather", "broadcast", "all_to_all"]
CallExecution = Literal["eager", "graph"]
ElementType = Literal["fp32", "bf16", "fp16"]
OWN_ALGORITHMS: tuple[OwnAlgorithm, ...] = get_args(OwnAlgorithm)
SYMMETRIC: tuple[SymmetricAlgorithm, ...] = get_args(SymmetricAlgorithm)
CAPTURED_ALGORITHMS: tuple[Algorithm, ...] = ("backend", *SYMMETRIC)
# One kernel for each call:
ONE_KERNEL: tuple[Algorithm, ...] = ("backend", "one_shot", "two_shot", "low_latency")
KEEPS_ITS_BUFFER: tuple[Algorithm, ...] = ("one_shot", "low_latency")  # can put the sum elsewhere
UNTRACED_CALLS = "DDPPERF_UNTRACED_CALLS"  # a variable of ranks that do not time the kernels of calls
GRAPH_CALLS = 20  # calls in one graph, like -G 20 of nccl-tests
FLOAT32_BYTES = 4
# The power of two by which the sums of all_reduces in place can grow, from the largest element with factor 1
ROOM_EXPONENT = {"fp32": 241.9, "bf16": 241.9, "fp16": 25.9}
EXACT_RANKS = 16  # sums over so many ranks, if they are a power of two, are exact in every type
LOW_LATENCY_BYTES = 2**28  # largest buffer of low_latency; the mailbox takes 6 times as much
PIECE_BYTES = 2**20  # size of the messages into which a ring divides a segment
MOST_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class Call(Spec):
    """Base class of the measurement specs for one collective call.

    nbytes: the size of a rank's buffer.
    dtype: the type of the buffer's elements.
    execution: "eager", or "graph" for a CUDA graph that holds GRAPH_CALLS collective calls.
    """

    # On 2 cores the call times of 4 process sets differ by 2% to 6%, in 20 measurements. If the process
    # sets take turns after whole rounds instead, their call times differ by 1% to 12%.
    compared_parts: ClassVar[Mapping[str, int]] = {"cpu": 4, "cuda": 1}

    world_size: Annotated[int, 2, MOST_RANKS]
    nbytes: Annotated[int, FLOAT32_BYTES]
    dtype: ElementType = "fp32"
    execution: CallExecution = "eager"  # type: ignore[misc]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        is_divided = getattr(self, "kind", "all_reduce") not in ("all_reduce", "broadcast")
        unit = FLOAT32_BYTES * (self.world_size if is_divided else 1)
        if self.nbytes % unit:
            what = "a float32 for each rank" if is_divided else "a float32"
            yield f"nbytes must be a multiple of {unit}, {what}, got {self.nbytes}"
        if self.captured and self.grows and self.calls_in_range < 2 * GRAPH_CALLS:
            found = f"{2 * GRAPH_CALLS} sums in place of {self.world_size} ranks exceed {self.dtype}"
            yield f"{found}; use fewer ranks, fp32 or bf16, or in_place=False"

    @property
    def calls(self) -> int:
        return GRAPH_CALLS if self.captured else 1

    @property
    def grows(self) -> bool:
        """Whether each call sums the results of the call before."""
        return getattr(self, "kind", "all_reduce") == "all_reduce" and getattr(self, "in_place", True)

    @property
    def calls_in_range(self) -> int:
        """How many sums in place stay within the range of the type, if buffers start as in `calls.py`."""
        room = ROOM_EXPONENT[self.dtype] - math.log2(sum(rank_factors(self.world_size)))
        return 1 + int(room / math.log2(self.world_size))

    @property
    def message_bytes(self) -> int:
        """The bytes that a rank sends to another at once: an all_to_all divides its buffer."""
        return self.nbytes // (self.world_size if getattr(self, "kind", "") == "all_to_all" else 1)


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec(Call):
    """Measurement spec for an all_reduce (sum) by NCCL, gloo or one of ddpperf's algorithms.

    in_place: whether the sum replaces the rank's buffer. If False, the buffer keeps its values, for
    which most algorithms need a copy of it.
    node_size: the ranks per node of the hierarchical algorithm, which are consecutive; otherwise 0.
    """

    measurement: ClassVar[str] = "all_reduce"
    rules: ClassVar[Rules] = (
        Rule("execution", ("graph",), algorithm=CAPTURED_ALGORITHMS),
        Rule("node_size", algorithm=("hierarchical",)),
        Rule("algorithm", ("low_latency",), dtype=("fp32",)),
        Rule("algorithm", ("one_shot", "two_shot"), dtype=("fp32", "bf16")),
    )

    algorithm: Algorithm = "backend"
    in_place: bool = True
    node_size: int = 0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.algorithm == "low_latency" and self.nbytes > LOW_LATENCY_BYTES:
            most = format_bytes(LOW_LATENCY_BYTES)
            yield f"algorithm low_latency sums up to {most}, got {self.nbytes} bytes; use two_shot"
        N, node_size = self.world_size, self.node_size
        if self.algorithm == "hierarchical" and (not 1 < node_size < N or N % node_size):
            takes = f"a node_size above 1 that divides {N} ranks into two nodes or more"
            yield f"algorithm hierarchical takes {takes}, got {node_size}"

    @property
    def maps_memory(self) -> bool:
        return self.algorithm in SYMMETRIC

    @property
    def copies(self) -> bool:
        """Whether a call is a copy of the buffer and an all_reduce of the copy."""
        return not self.in_place and self.algorithm not in KEEPS_ITS_BUFFER


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec(Call):
    """Measurement spec for a reduce_scatter, all_gather, broadcast or all_to_all by NCCL or gloo.

    FSDP and ZeRO use such collectives.
    nbytes: the size of the larger of a rank's two buffers, as in nccl-tests. This buffer is the
    input of a reduce_scatter and the output of an all_gather.
    """

    measurement: ClassVar[str] = "collective"

    kind: CollectiveKind


@dataclass(frozen=True, kw_only=True)
class SingleCallsSpec(Call):
    """Measurement spec for the tails of a collective by NCCL or gloo: each call is timed by itself."""

    measurement: ClassVar[str] = "single_calls"
    rules: ClassVar[Rules] = (Rule(execution=("eager",)),)

    kind: Literal["all_reduce", CollectiveKind] = "all_reduce"


@dataclass(frozen=True, kw_only=True)
class CopySpec(Spec):
    """Measurement spec for one copy of `nbytes` bytes within the memory of each rank's device.

    memory: "host" for a copy by the CPU, also in ranks that have GPUs. If the buffer fits into a core's
    cache, its time shows slower cores.
    """

    measurement: ClassVar[str] = "copy"
    # On 2 busy cores the copy times of 4 process sets differ by 0.4% to 1.9%. If the process sets
    # take turns after whole rounds instead, their copy times differ by 1.4% to 3.4%.
    compared_parts: ClassVar[Mapping[str, int]] = {"cpu": 16, "cuda": 16}

    nbytes: Positive
    memory: Literal["device", "host"] = "device"

    @property
    def grouped(self) -> bool:
        return False

    @property
    def on_cpu(self) -> bool:
        return self.memory == "host"


def rank_factors(N: int) -> list[int]:
    """Return the factor of each rank's buffer in an all_reduce; over many ranks, the sums stay small."""
    return [1 + rank % (2 if N > EXACT_RANKS else EXACT_RANKS) for rank in range(N)]


def ring_pieces(nbytes: float, N: int) -> int:
    """Return the number of messages in which a ring all_reduce sends each 1/N of its buffer."""
    return min(MOST_PIECES, max(1, int(nbytes // N // PIECE_BYTES)))


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes as text in the largest whole unit, such as 64MiB, 1KiB or 1000B."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"
