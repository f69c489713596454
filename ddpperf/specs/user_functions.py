"""Import a function of the user, such as a custom model, in a rank."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ddpperf.errors import CannotTrain, first_line
from ddpperf.specs import FUNCTIONS_VARIABLE


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
