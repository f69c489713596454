"""Load a custom model: a function that returns a module, a batch maker and a loss function."""

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
    """A custom model, with its module, its function that makes batches, and its loss function.

    make_batch(batch_size) returns inputs and targets, tensors of batch_size rows.
    loss(outputs, targets) returns a scalar.
    """

    name: str
    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]

    def batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return a custom model's batch, which must be two tensors of `batch_size` rows.

        Raises CannotTrain for any other batch.
        """
        made = self.make_batch(batch_size)
        if not (
            isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)
        ):
            raise CannotTrain(
                f"the batch maker of {self.name} must return (inputs, targets), "
                f"got {_describe(made)}; return tensors"
            )
        if any(part.shape[:1] != (batch_size,) for part in made):
            shapes = " and ".join(str(tuple(part.shape)) for part in made)
            raise CannotTrain(
                f"the batch maker of {self.name} was asked for {batch_size} rows, "
                f"got shapes {shapes}; return as many"
            )
        return made


def custom_model(name: str) -> CustomModel:
    """Import and call a custom model's function, and return its module, batch maker and loss.

    name: `package.module:function`.
    Raises CannotTrain if the name was not given when this process started, if the function cannot
    be imported, or if the function does not return (module, batch maker, loss).
    """
    if os.environ.get(MODEL_VARIABLE) != name:
        raise CannotTrain(f"model {name} was not named on the command line; pass --model {name}")
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CannotTrain(
            f"model {name} cannot be imported ({first_line(error)}); "
            "name a module that python -c 'import ...' finds"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CannotTrain(
            f"model {name} cannot be found: {module_name} has no function {function_name}; "
            "name one of its functions"
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
