"""The names of models: ours, torchvision's, and the user's own."""

from __future__ import annotations

import re
from typing import Literal, get_args

Model = Literal["resnet18", "resnet18_cifar", "resnet50_cifar", "resnet10_cifar"]
# Of a rank's environment, for no message may name a module: the one model of the user's own that may be imported.
MODEL_VARIABLE = "DDPPERF_MODEL"


def is_custom_model(model: str) -> bool:
    """Whether a model is the user's own, `package.module:function`."""
    return ":" in model and not model.startswith("torchvision:")


def require_model(model: str) -> None:
    """Raise ValueError unless `model` is one of ours, or spelled as another can be named."""
    if model in get_args(Model):
        return
    if not isinstance(model, str) or not re.fullmatch(
        r"torchvision:\w+|[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", model
    ):
        known = ", ".join(get_args(Model))
        raise ValueError(
            f"model must be one of {known}, torchvision:NAME or package.module:function, got {model!r}"
        )
