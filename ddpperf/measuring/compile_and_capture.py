"""Compile a training step with torch.compile, or capture a training step in a CUDA graph."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.errors import CannotTrain, first_line, last_line

COMPILES_AGAIN = "a compiled step was compiled again in a timed round"
ADVICE = "if its control flow or its shapes depend on data, use --executions eager"
POOL_STREAMS = 32  # of a device, which torch hands out in turn

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], inductor: str, part_bytes: int = 0) -> Callable[P, R]:
    """Wrap a function so that torch.compile compiles it at its first call.

    The function is compiled for the tensor shapes of the first call only.

    inductor: names of torch's compiler options to switch on, joined by "+".
    part_bytes: if not 0, the function is compiled in parts with this many bytes of parameters each,
    counted from the last parameter. The backward pass of a part returns the gradients of that part
    as soon as it ends. A call of the wrapped function raises CannotTrain if it would have to
    compile again after `forbid_compiling`.
    """
    options: dict[str, Any] | None = dict.fromkeys(inductor.split("+"), True) if inductor else None
    forget_compiled()  # torch stops compiling a function after eight compilations
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.utils.counters["graph_break"].clear()
    try:
        if part_bytes:  # in parts, as torch does for DDP
            from torch._dynamo.backends.distributed import DDPOptimizer
            from torch._inductor.compile_fx import compile_fx

            compiler: Any = partial(compile_fx, config_patches=options)
            parts = DDPOptimizer(part_bytes, compiler, first_bucket_cap=part_bytes)
            optimized = torch.compile(function, dynamic=False, backend=parts.compile_fn)
        else:
            optimized = torch.compile(function, dynamic=False, options=options)
    except RuntimeError as error:
        why = f"({first_line(error)[:80]}); name other options"
        raise CannotTrain(f"inductor={inductor} cannot be switched on {why}") from error

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return optimized(*args, **kwargs)
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise CannotTrain(f"{COMPILES_AGAIN} ({last_line(error)}); {ADVICE}") from error

    return call


def forbid_compiling() -> int:
    """Make it an error if torch.compile recompiles a function from now on.

    Returns the number of graphs compiled so far, which `require_none_new` needs.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = True
    return compiled_graphs()


def require_none_new(before: int) -> None:
    """Raise CannotTrain if torch.compile has compiled more graphs than the given number.

    torch itself can forbid recompiling a graph, but not compiling a new graph.
    """
    if compiled_graphs() != before:
        raise CannotTrain(f"{COMPILES_AGAIN} (a part of it ran for the first time); {ADVICE}")


def require_compiled(losses: Sequence[Tensor]) -> None:
    """Raise CannotTrain if torch.compile compiled no layer that trains a parameter."""
    if any(map(trains_compiled, losses)):
        return
    breaks = [reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"] if reason]
    why = f"{breaks[0] if breaks else 'torch does not say why'}; use --executions eager"
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            why = f"{name} is set; unset it"
    raise CannotTrain(f"torch.compile compiled no layer of the model: {why}")


def trains_compiled(loss: Tensor) -> bool:
    """Return whether a compiled backward pass computes the gradient of a parameter."""
    seen: set[Any] = set()
    rest: list[Any] = [loss.grad_fn]
    while rest:
        node = rest.pop()
        for following in {each for each, _ in node.next_functions if each is not None} - seen:
            seen.add(following)
            if following.name().endswith("AccumulateGrad"):
                if "CompiledFunction" in node.name():
                    return True
            else:
                rest.append(following)
    return False


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def forget_compiled() -> None:
    """Discard all code that torch.compile has compiled in this process, and free its memory.

    Without such code, torch's reset would only take time: on a GPU, it imports the compiler in 2.5 s.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.error_on_recompile = False
    if compiled_graphs():
        torch._dynamo.reset()


def capture(step: Callable[[], None], execution: str) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of the GPU work that a training step launches.

    The step runs once for the capture, during which the GPU computes nothing. Before the capture
    the step must have run on the current stream until it launches the same work each time. All
    tensors that the step uses must live as long as the graph. The current stream must not be the
    default stream, which cannot be captured. Raises CannotTrain if the step waits for the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    _take_streams_past_the_current_one()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            step()
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        why = "waits for the device, as control flow that depends on data does, use --executions eager"
        what = f"execution {execution} cannot capture this step ({first_line(error)})"
        raise CannotTrain(f"{what}; if something in it {why}") from error
    return graph


def _take_streams_past_the_current_one() -> None:
    """Advance torch's pool of streams past the current stream and the stream after it.

    torch runs each callback of a collective, such as those of DDP's communication hooks, on the next
    stream of its pool. On the step's own stream, all kernels of the step that follow would wait for
    the collective, in each replay of the graph. The stream after it is often that of a hook, which
    is built next. This holds for the first 30 callbacks of a captured step, which are as many buckets.
    """
    own = torch.cuda.current_stream()
    for _ in range(POOL_STREAMS):
        if torch.cuda.Stream() == own:
            torch.cuda.Stream()
            return
