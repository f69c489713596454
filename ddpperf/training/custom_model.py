"""A user's own model: a function that returns the module, a maker of batches and the loss."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddpperf.errors import CannotTrain, first_line
from ddpperf.specs import MODEL_VARIABLE


@dataclass(frozen=True, kw_only=True)
class CustomModel:
    """make_batch(batch_size) gives inputs and targets, tensors of batch_size rows; loss(outputs, targets) a scalar."""

    name: str
    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]

    def batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets; raises CannotTrain unless they are tensors of batch_size rows."""
        made = self.make_batch(batch_size)
        if not (
            isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)
        ):
            raise CannotTrain(
                f"the batch maker of {self.name} must return (inputs, targets), got {_describe(made)}; return tensors"
            )
        if any(part.shape[:1] != (batch_size,) for part in made):
            shapes = " and ".join(str(tuple(part.shape)) for part in made)
            raise CannotTrain(
                f"the batch maker of {self.name} was asked for {batch_size} rows, got shapes {shapes}; return as many"
            )
        return made


def custom_model(name: str) -> CustomModel:
    """What the function `package.module:function` returns; raises CannotTrain for a path that cannot be imported, or one
    that was not named when this process was started, and for anything else than the three."""
    if os.environ.get(MODEL_VARIABLE) != name:
        raise CannotTrain(f"model {name} was not named on the command line; pass --model {name}")
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CannotTrain(
            f"model {name} cannot be imported ({first_line(error)}); name a module that python -c 'import ...' finds"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CannotTrain(
            f"model {name} cannot be found: {module_name} has no function {function_name}; name one of its functions"
        )
    made = function()
    if not (
        isinstance(made, tuple)
        and len(made) == 3
        and isinstance(made[0], nn.Module)
        and all(map(callable, made[1:]))
    ):
        raise CannotTrain(
            f"model {name} must return (module, batch maker, loss), got {_describe(made)}; return the three"
        )
    return CustomModel(name=name, module=made[0], make_batch=made[1], loss=made[2])


def _describe(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a value of type {type(made).__name__}"
