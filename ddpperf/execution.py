"""The forms of a step: compiled, and captured in a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ddpperf.errors import CannotTrain, first_line, last_line

COMPILES_AGAIN = "a compiled step was compiled again in a timed round"
ADVICE = "if its control flow or its shapes depend on data, use --executions eager"

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], inductor: str, part_bytes: int = 0) -> Callable[P, R]:
    """`function`, compiled at its first call, for the shapes it gets. inductor: torch's options to switch on, joined by +.
    part_bytes: in parts of so many bytes of parameters, counted from the end; each gives its gradients when it is done, as do
    those that DDP makes of a model.

    A call raises CannotTrain where it would compile again although that is forbidden.
    """
    options: dict[str, Any] | None = dict.fromkeys(inductor.split("+"), True) if inductor else None
    forget_compiled()  # compilations are counted by function: after eight trainings torch would go on without compiling
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        by: dict[str, Any] = (
            {"backend": in_parts(part_bytes, options)} if part_bytes else {"options": options}
        )
        optimized = torch.compile(function, dynamic=False, **by)
    except RuntimeError as error:
        sentence = first_line(error)[:80]
        raise CannotTrain(
            f"inductor={inductor} cannot be switched on ({sentence}); name other options"
        ) from error

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return optimized(*args, **kwargs)
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise CannotTrain(f"{COMPILES_AGAIN} ({last_line(error)}); {ADVICE}") from error

    return call


def in_parts(part_bytes: int, options: dict[str, Any] | None) -> Callable[..., Any]:
    """A backend of torch.compile that compiles a function in parts."""
    from torch._dynamo.backends.distributed import (
        DDPOptimizer,
    )  # only here: every rank would wait for the import
    from torch._inductor.compile_fx import compile_fx

    compiler: Any = partial(compile_fx, config_patches=options)
    return DDPOptimizer(part_bytes, compiler, first_bucket_cap=part_bytes).compile_fn


def forbid_compiling() -> int:
    """From now on compiling again is an error: it would be timed. Gives the graphs compiled so far, for `require_none_new`."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = True
    return _compiled_graphs()


def require_none_new(compiled_graphs: int) -> None:
    """Raise CannotTrain if more was compiled since: of what runs for the first time torch forbids nothing."""
    if _compiled_graphs() != compiled_graphs:
        raise CannotTrain(f"{COMPILES_AGAIN} (a part of it ran for the first time); {ADVICE}")


def _compiled_graphs() -> int:
    return (
        int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if "torch._dynamo" in sys.modules else 0
    )


def forget_compiled() -> None:
    """Let go of what was compiled, and of the memory that it holds; costs nothing where nothing was."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


def capture(step: Callable[[], None], execution: str) -> torch.cuda.CUDAGraph:
    """What `step` launches, to be replayed; it runs once without computing. Raises CannotTrain if it waits for the device.

    step must have run on the current stream often enough that it does the same again, and all that it uses must live as long
    as the graph. That stream must not be the device's default one, from which nothing is captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            step()
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        raise CannotTrain(
            f"execution {execution} cannot capture this step ({first_line(error)}); if something in it waits for the device, "
            "as control flow that depends on data does, use --executions eager"
        ) from error
    return graph
