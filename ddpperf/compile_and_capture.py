"""How a step is executed: compiled by torch.compile, or captured in a CUDA graph."""

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
    """Return `function` compiled, at its first call, for the shapes of that call.

    inductor: torch's compiler options to switch on, joined by +.
    part_bytes: compile in parts with so many bytes of parameters, counted from the end. Each part
    gives its gradients when it is done, like the parts that DDP makes of a model.
    A call raises CannotTrain if it would compile again although that is forbidden.
    """
    options: dict[str, Any] | None = dict.fromkeys(inductor.split("+"), True) if inductor else None
    forget_compiled()  # torch counts compilations by function, and stops compiling after eight
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        backend: Any = in_parts(part_bytes, options) if part_bytes else "inductor"
        optimized = torch.compile(
            function, dynamic=False, backend=backend, options=None if part_bytes else options
        )
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
    """Return a backend of torch.compile that compiles a function in parts."""
    # Imported here, because the imports are slow.
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor.compile_fx import compile_fx

    compiler: Any = partial(compile_fx, config_patches=options)
    return DDPOptimizer(part_bytes, compiler, first_bucket_cap=part_bytes).compile_fn


def forbid_compiling() -> int:
    """Make compiling again an error; return the number of compiled graphs for `require_none_new`."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = True
    return _compiled_graphs()


def require_none_new(compiled_graphs: int) -> None:
    """Raise CannotTrain if more graphs were compiled; torch itself forbids recompiling only."""
    if _compiled_graphs() != compiled_graphs:
        raise CannotTrain(f"{COMPILES_AGAIN} (a part of it ran for the first time); {ADVICE}")


def _compiled_graphs() -> int:
    return (
        int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if "torch._dynamo" in sys.modules else 0
    )


def forget_compiled() -> None:
    """Drop all compiled code and its memory; does nothing if nothing was compiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


def capture(step: Callable[[], None], execution: str) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what `step` launches; `step` runs once without computing.

    `step` must have run on the current stream until it repeats itself, and all tensors it uses must
    live as long as the graph. The current stream must not be the default one, which cannot be
    captured. Raises CannotTrain if `step` waits for the device.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            step()
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        raise CannotTrain(
            f"execution {execution} cannot capture this step ({first_line(error)}); if something in it "
            "waits for the device, as control flow that depends on data does, use --executions eager"
        ) from error
    return graph
