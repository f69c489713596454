"""The forms of a step: compiled, and captured in a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ddpperf.own_model import WrongModel, first_line

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], inductor: str) -> Callable[P, R]:
    """`function`, compiled at its first call, for the shapes it gets. inductor: torch's options to switch on, joined by +."""
    options: dict[str, Any] | None = dict.fromkeys(inductor.split("+"), True) if inductor else None
    forget_compiled()  # compilations are counted by function: after eight trainings torch would go on without compiling
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        return torch.compile(function, dynamic=False, options=options)
    except RuntimeError as error:
        raise WrongModel(f"inductor={inductor} cannot be switched on ({first_line(error)[:80]}); name other options") from error


def forbid_compiling() -> None:
    """From now on compiling again is an error: it would be timed."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = True


def forget_compiled() -> None:
    """Let go of what was compiled, and of the memory that it holds; costs nothing where nothing was."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


def capture(step: Callable[[], None], stream: torch.cuda.Stream, form: str) -> torch.cuda.CUDAGraph:
    """What `step` launches, to be replayed; it runs once without computing. Raises WrongModel if it waits for the device.

    step must have run on `stream` often enough that it does the same again; all that it uses must live as long as the graph.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        raise WrongModel(
            f"form {form} cannot capture this step ({first_line(error)}); if something in it waits for the device, "
            "as control flow that depends on data does, use --forms eager"
        ) from error
    return graph
