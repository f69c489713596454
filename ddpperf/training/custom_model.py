"""Load a custom model: a function that returns a module, a batch maker and a loss function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ddpperf.errors import CannotTrain, first_line
from ddpperf.specs import MODEL_VARIABLE

Loss = Callable[[Any, Tensor], Tensor]  # from outputs and targets to a scalar
MakeBatch = Callable[[int], tuple[Tensor, Tensor]]  # from a batch size to inputs and targets


def custom_model(name: str) -> tuple[nn.Module, MakeBatch, Loss]:
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
        advice = "name a module that python -c 'import ...' finds"
        raise CannotTrain(f"model {name} cannot be imported ({first_line(error)}); {advice}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        why = f"{module_name} has no function {function_name}; name one of its functions"
        raise CannotTrain(f"model {name} cannot be found: {why}")
    made = function()
    is_three = isinstance(made, tuple) and len(made) == 3
    if not (is_three and isinstance(made[0], nn.Module) and all(map(callable, made[1:]))):
        why = f"must return (module, batch maker, loss), got {_describe(made)}; return the three"
        raise CannotTrain(f"model {name} {why}")
    return made[0], made[1], made[2]


def custom_batch(name: str, make_batch: MakeBatch, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return a custom model's batch, which must be two tensors of `batch_size` rows.

    Raises CannotTrain for any other batch.
    """
    made = make_batch(batch_size)
    is_two = isinstance(made, tuple) and len(made) == 2
    if not (is_two and all(isinstance(part, Tensor) for part in made)):
        why = f"must return (inputs, targets), got {_describe(made)}; return tensors"
        raise CannotTrain(f"the batch maker of {name} {why}")
    if any(part.shape[:1] != (batch_size,) for part in made):
        shapes = " and ".join(str(tuple(part.shape)) for part in made)
        why = f"was asked for {batch_size} rows, got shapes {shapes}; return as many"
        raise CannotTrain(f"the batch maker of {name} {why}")
    return made


def _describe(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a value of type {type(made).__name__}"
