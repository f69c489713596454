"""A DataParallel that communicates between replicas on the CPU, where torch's runs the module alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

REPLICAS = 2


class Broadcast(Function):
    """Copy tensors for all replicas; the backward pass adds up their gradients, as torch's does."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for _ in range(REPLICAS) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        number = len(gradients) // REPLICAS
        return tuple(torch.stack(gradients[place::number]).sum(0) for place in range(number))


class Gather(Function):
    """Concatenate the outputs of all replicas; the backward pass divides their gradient."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.chunk(REPLICAS)


class CpuDataParallel(nn.DataParallel[nn.Module]):
    """torch's DataParallel, whose own forward pass calls the four parts on the CPU."""

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        super().__init__(module)
        self.device_ids, self.output_device, self.dim = list(device_ids), 0, 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return [(part,) for part in inputs[0].chunk(len(device_ids))], [{} for _ in device_ids]

    def replicate(self, module: Any, device_ids: Any) -> Any:
        names = [name for name, _ in module.named_parameters()]
        copies = Broadcast.apply(*module.parameters())
        parts = [dict(zip(names, copies[len(names) * k :], strict=False)) for k, _ in enumerate(device_ids)]
        return [lambda inputs, part=part: functional_call(module, part, (inputs,)) for part in parts]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        return in_threads(replicas, inputs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return Gather.apply(*outputs)


def in_threads(
    functions: Sequence[Callable[..., Any]], inputs: Sequence[Sequence[Any]], *, devices: Any = None
) -> list[Any]:
    """Call the functions in new threads, as torch's parallel_apply does on GPUs, which refuses the same."""
    assert len(functions) == len(inputs)
    assert devices is None or len(devices) == len(functions)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda k=k, function=function: found.update({k: function(*inputs[k])}))
        for k, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    return [found[k] for k in range(len(functions))]


@pytest.fixture
def cpu_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let strategy data_parallel train two replicas on the CPU."""
    monkeypatch.setattr("ddpperf.training.step.gpu_reason", lambda *_: "")
    monkeypatch.setattr("ddpperf.training.strategies.DataParallel", CpuDataParallel)
    monkeypatch.setattr("ddpperf.training.separate_replicas.parallel_apply", in_threads)
    for module in ("strategies", "separate_replicas"):
        monkeypatch.setattr(f"ddpperf.training.{module}.driven_gpus", lambda spec: [0] * REPLICAS)
