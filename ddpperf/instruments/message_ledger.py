"""What ranks send each other: every collective that torch dispatches, from Python or from DDP's own C++, with its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpperf.specs import MessagesSpec
from ddpperf.training.step import TrainingStep

NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
# Which collectives are of which kind in which phase; whatever is in none of them is told as OTHER.
KINDS = {
    ("start", "broadcast"): "initial state",
    ("start", "allgather"): "control",
    ("forward", "broadcast"): "buffers",
    ("forward", "allgather"): "parameters",
    ("backward", "allreduce"): "gradients",
    ("backward", "reduce_scatter"): "gradients",
    ("backward", "allgather"): "parameters",
    ("optimizer", "broadcast"): "parameters",
    ("metrics", "allreduce"): "metrics",
}
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective of a rank. nbytes: of its buffer by nccl-tests' convention: what all_reduce and broadcast work on, and the
    whole that an all_gather puts together or a reduce_scatter begins with."""

    phase: str
    collective: str
    nbytes: int

    @property
    def kind(self) -> str:
        """What it is for; a barrier is control wherever it is met, and what no kind is known for is told as "other"."""
        if self.collective == "barrier":
            return "control"
        return KINDS.get((self.phase, self.collective), OTHER)


class Ledger(TorchDispatchMode):
    """While it is entered, the messages of this process, in their order; `phase` is that of those that follow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: list[Message] = []
        self.phase = "start"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func.namespace in NAMESPACES and (collective := _collective(func)) != "wait_tensor":
            nbytes = max(map(_bytes_of, (*args, *(kwargs or {}).values())), default=0)
            self.messages.append(Message(phase=self.phase, collective=collective, nbytes=nbytes))
        return func(*args, **(kwargs or {}))


def _collective(func: Any) -> str:
    """The operator's name without what only says how it is called: allreduce_ and all_reduce are one collective."""
    name = func.__name__.partition(".")[0].strip("_")
    words = {"all_reduce": "allreduce", "all_gather_into_tensor": "allgather"}
    known = ("allreduce", "allgather", "reduce_scatter", "broadcast", "barrier")
    name = words.get(name, name)
    return next((each for each in known if name.startswith(each)), name)


def _bytes_of(argument: object) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, list | tuple) else 0


def totals(messages: Iterable[Message]) -> dict[str, tuple[int, int]]:
    """By kind, how many messages there were, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    for message in messages:
        count, nbytes = found.get(message.kind, (0, 0))
        found[message.kind] = count + 1, nbytes + message.nbytes
    return found


class CountedTraining(TrainingStep):
    """The same training, whose messages are written down: of its start, and of each step. `step` ends with a mean loss over all
    ranks, for what DDP sends are gradients: every rank knows its own loss only."""

    max_iterations = 1

    def __init__(self, spec: MessagesSpec, *, rank: int, device: torch.device) -> None:
        self.ledger = Ledger()
        with self.ledger:
            super().__init__(spec, rank=rank, device=device)
        self.start, self.ledger.messages = self.ledger.messages, []
        self.enter = self.begin

    def begin(self, part: str) -> None:
        self.ledger.phase = part

    def step(self) -> None:
        self.ledger.messages, self.ledger.phase = [], "data"
        with self.ledger:
            self.advance()
            self.ledger.phase = "metrics"
            dist.all_reduce(self.loss / self.spec.world_size)

    def finish(self) -> dict[str, float]:
        """Messages and bytes of each kind, of the start and of the last step, of this also by collective, and of each message
        of gradients ("bucket 0"); parameter_bytes: of the model's parameters; gradient_bytes: what DDP's gradients are."""
        counted = {f"start {kind}": total for kind, total in totals(self.start).items()}
        counted |= totals(self.ledger.messages)
        for collective in sorted({message.collective for message in self.ledger.messages}):
            those = [message for message in self.ledger.messages if message.collective == collective]
            counted |= {f"{kind} by {collective}": total for kind, total in totals(those).items()}
        counters = {f"{kind}: messages": float(count) for kind, (count, _) in counted.items()}
        counters |= {f"{kind}: bytes": float(nbytes) for kind, (_, nbytes) in counted.items()}
        buckets = [message.nbytes for message in self.ledger.messages if message.kind == "gradients"]
        counters |= {f"bucket {number}: bytes": float(nbytes) for number, nbytes in enumerate(buckets)}
        return counters | self.sent() | {"parameter_bytes": float(self.gradient_bytes)}
