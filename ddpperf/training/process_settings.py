"""Settings of the whole process that a user's function may change, such as torch's default dtype.

They must not reach the measurements of other tests in the same process.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as modules

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
_CPU = torch.device("cpu")


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _flushes_denormal() -> bool:
    return not torch.full((), 1e-310, dtype=torch.float64, device=_CPU).mul(1).item()


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it contradicts the settings of _FP32_PRODUCTS
        return ""


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:  # other threads may read the others meanwhile
            os.environ[name] = value


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def _set_path(path: list[str]) -> None:
    sys.path[:] = path


def _autocast(device: str) -> Setting:
    return partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)


def _hooks(hooks: dict[int, Any]) -> Setting:
    def set_hooks(items: list[Any]) -> None:
        hooks.clear()
        hooks.update(items)

    return lambda: list(hooks.items()), set_hooks


def _flag(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Whether products of fp32 numbers may use TF32 or bf16. torch.set_float32_matmul_precision sets some of them.
# The first one sets the others.
_BACKENDS: Any = torch.backends
_FP32_PRODUCTS = (
    *(_BACKENDS, _BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv),
    *(_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv),
)

# How to read and write each setting
_SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    # Without a default device, torch has no mode that looks at each call
    (torch.get_default_device, lambda device: torch.set_default_device(None if device == _CPU else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_deterministic, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),
    (_flushes_denormal, torch.set_flush_denormal),
    (torch.get_num_threads, torch.set_num_threads),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    (_matmul_precision, lambda name: torch.set_float32_matmul_precision(name) if name else None),
    *(_flag(product, "fp32_precision") for product in _FP32_PRODUCTS),
    _flag(torch.backends.mkldnn, "enabled"),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),  # on a CPU, too
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    (lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)),
    *map(_autocast, ("cpu", "cuda")),
    (torch.autograd.is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    *map(_hooks, (modules._global_forward_pre_hooks, modules._global_forward_hooks)),
    (sys.getprofile, sys.setprofile),
    (sys.gettrace, sys.settrace),
    (sys.getswitchinterval, sys.setswitchinterval),
    (logging.root.getEffectiveLevel, logging.root.setLevel),
    (os.getcwd, os.chdir),
    (lambda: list(sys.path), _set_path),
    (lambda: list(warnings.filters), _set_filters),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (lambda: dict(os.environ), _set_environment),
)


def process_settings() -> list[Any]:
    """Return the present settings, for `restore`."""
    return [read() for read, _ in _SETTINGS]


def restore(settings: list[Any]) -> None:
    """Set what has changed since `process_settings` returned these settings."""
    for (read, write), value in zip(_SETTINGS, settings, strict=True):
        if read() != value:
            write(value)
