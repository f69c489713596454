"""Functions of the user that the ranks import, and the measurement specs that name them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from ddpperf.errors import CannotTrain, first_line
from ddpperf.specs.collective import Call, CallExecution
from ddpperf.specs.spec import Function, Positive, Spec

# An environment variable of the ranks with the functions that the ranks may import, joined by commas. A
# rank imports no other module that a message names.
FUNCTIONS_VARIABLE = "DDPPERF_FUNCTIONS"
# Printed after the check of a model. Without it, the model's own code has ended the process.
TRAINED = "ddpperf: the model was trained"
CustomKind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class CustomStepSpec(Spec):
    """Measurement spec for one training step of the user's own function.

    function: `package.module:function`. Each rank calls it as `function(rank=..., world_size=...,
    batch_size=..., device=...)`. The function returns another function, which trains one step and
    returns the loss, a tensor with one element.
    per_rank_batch_size: passed to the function as `batch_size`.
    execution: "eager", or "graph" to capture a step in a CUDA graph.

    With world_size=1 there is no process group, and each rank is measured alone, in turn.
    """

    measurement: ClassVar[str] = "custom_step"

    function: Function
    per_rank_batch_size: Positive
    execution: CallExecution = "eager"  # type: ignore[misc]

    @property
    def grouped(self) -> bool:
        return self.world_size > 1

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function,)

    def turns(self, size: int) -> list[list[int]]:
        return super().turns(size) if self.grouped else [[rank] for rank in range(size)]

    def one_device(self) -> Self:
        """Return a spec for the same training step on a single device.

        Its seconds are the single-device step time t(1) of a speedup.
        """
        return replace(self, world_size=1, delay_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class CustomCollectiveSpec(Call):
    """Measurement spec for a collective call of the user's own function.

    kind: what the function must compute, as the function of torch.distributed of the same name. The
    result is checked after each timed round.
    function: `package.module:function`. An all_reduce is called as `function(buffer)`, and replaces
    the buffer by the sum. A broadcast is called as `function(buffer)`, and sends rank 0's buffer. The
    other kinds are called as `function(result, source)`.
    nbytes: the size of the larger of a rank's buffers.
    """

    measurement: ClassVar[str] = "custom_collective"

    kind: CustomKind = "all_reduce"
    function: Function

    algorithm: ClassVar[str] = "custom"
    in_place: ClassVar[bool] = True

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function,)


def import_function(name: str, role: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names.

    role: what the function is for, such as "model", for the message. Raises CannotTrain if the
    environment variable FUNCTIONS_VARIABLE does not list the function, or if the function cannot be
    imported.
    """
    if name not in os.environ.get(FUNCTIONS_VARIABLE, "").split(","):
        advice = f"use it in the spec of a case, or pass --model {name} for a model"
        raise CannotTrain(f"{role} {name} was not named when the ranks started; {advice}")
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        advice = f"try python -c 'import {module_name}' in the folder of the test run"
        raise CannotTrain(f"{role} {name} cannot be imported ({first_line(error)}); {advice}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        why = f"{module_name} has no function {function_name}; name one of its functions"
        raise CannotTrain(f"{role} {name} cannot be found: {why}")
    found: Callable[..., Any] = function
    return found
