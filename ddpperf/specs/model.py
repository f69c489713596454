"""Names of the models that can be trained: built-in models, torchvision's and custom models."""

from __future__ import annotations

import re
from typing import Literal, get_args

Model = Literal["resnet18", "resnet18_cifar", "resnet50_cifar", "resnet10_cifar"]
# An environment variable of the ranks with the only custom model that the ranks may import. A rank
# imports no other module that a message names.
MODEL_VARIABLE = "DDPPERF_MODEL"
_PATTERN = r"torchvision:\w+|[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


def is_custom_model(model: str) -> bool:
    """Return whether a model's name is that of a custom model: `package.module:function`."""
    return ":" in model and not model.startswith("torchvision:")


def require_model(model: str) -> None:
    """Raise ValueError unless a name is valid for a built-in, torchvision or custom model."""
    known = get_args(Model)
    if model not in known and not re.fullmatch(_PATTERN, model):
        other = "torchvision:NAME or package.module:function"
        raise ValueError(f"model must be one of {', '.join(known)}, {other}, got {model!r}")
