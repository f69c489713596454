"""Record every collective that torch dispatches, called by Python code or by DDP's C++ code."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
# The kind of a collective in a phase. Every other combination has the kind "other".
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


class Message(NamedTuple):
    """One collective that a rank called: its purpose, such as "gradients" or "parameters", and its size.

    The purpose of every barrier is "control". An unknown purpose is "other".
    nbytes: the size of the collective's buffer as nccl-tests counts it. The buffer is what an
    all_reduce or broadcast works on, the output of an all_gather, or the input of a reduce_scatter.
    """

    kind: str
    nbytes: int


class Ledger(TorchDispatchMode):
    """Context manager that records every collective which this process starts inside the context.

    phase: the phase of the training step to which the next collectives belong.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: list[Message] = []
        self.phase = "start"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: otherwise torch 2.11 runs it eagerly, also after the context."""
        return True

    def enter_part(self, part: str) -> None:
        self.phase = part

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES and (collective := _collective(func)) != "wait_tensor":
            kind = KINDS.get((self.phase, collective), "other") if collective != "barrier" else "control"
            nbytes = max(map(_bytes_of, (*args, *(kwargs or {}).values())), default=0)
            self.messages.append(Message(kind, nbytes))
        return func(*args, **(kwargs or {}))


def _collective(func: Any) -> str:
    """Return one name for the variants of a collective, such as allreduce_ and all_reduce."""
    name = func.__name__.partition(".")[0].strip("_")
    name = {"all_reduce": "allreduce", "all_gather_into_tensor": "allgather"}.get(name, name)
    known = ("allreduce", "allgather", "reduce_scatter", "broadcast", "barrier")
    return next((collective for collective in known if name.startswith(collective)), name)


def _bytes_of(argument: object) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, list | tuple) else 0
