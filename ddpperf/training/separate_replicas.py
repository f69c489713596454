"""The training step of DataParallel without its communication.

In torch's DataParallel, one process drives several GPUs. In each step DataParallel copies the model
to all GPUs (replicate), sends each GPU its part of the batch (scatter), and collects the outputs on
the first GPU (gather). The backward pass scatters the gradients of the outputs, and adds up the
gradients of the parameters on the first GPU (reduce).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, parallel_apply

from ddpperf.specs import TrainingSpec
from ddpperf.training.step import TrainingStep

MicroBatch = list[tuple[Any, Tensor]]  # the inputs and targets of each device


class SeparateReplicas(TrainingStep):
    """A training step of DataParallel without its communication.

    The devices keep their replicas of the model, and their parts of the first batch. In each step every
    device computes the loss and the gradients of its own part. As in DataParallel, threads run the
    forward passes, one backward call serves all devices, and only the first replica is updated.
    """

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        assert isinstance(self.model, DataParallel)
        module = self.model.module
        self.devices = [torch.device(device.type, index) for index in self.model.device_ids]
        self.replicas = [module]
        for other in self.devices[1:]:
            replica = copy.deepcopy(module).to(other)
            # DataParallel flattens parameters to send them, so that its replicas lose their format.
            self.replicas.append(replica.to(memory_format=torch.contiguous_format))
        self.kept: list[MicroBatch] = []

    def train(self) -> None:
        """Make one optimizer step of the first replica, and compute the gradients of all replicas."""
        inputs, targets = self.take()
        self.kept = self.kept or self._scattered(inputs, targets)
        self.schedule.step()
        self.optimizer.zero_grad()
        for replica in self.replicas[1:]:
            replica.zero_grad()
        first = []
        for micro_batch in self.kept:
            work = [(replica, *part) for replica, part in zip(self.replicas, micro_batch, strict=True)]
            functions: Any = [self._loss] * len(work)
            losses: list[Tensor] = parallel_apply(functions, work, devices=self.devices)
            scaled = self.scaler.scale(losses)
            torch.autograd.backward(scaled, [torch.full_like(loss, 1 / len(self.kept)) for loss in scaled])
            first.append(losses[0].detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss = torch.stack(first).mean()
        if self.device.type == "cuda":  # the events that time the step are on the first GPU's stream
            stream = torch.cuda.current_stream(self.device)
            for other in self.devices[1:]:
                stream.wait_stream(torch.cuda.current_stream(other))

    def _scattered(self, inputs: Tensor, targets: Tensor) -> list[MicroBatch]:
        """Return the parts of a batch on their devices, as DataParallel divides each micro-batch."""
        parts, N = self.spec.accumulation_steps, len(self.devices)
        return [
            [
                (some.to(device), labels.to(device))
                for some, labels, device in zip(images.chunk(N), classes.chunk(N), self.devices, strict=True)
            ]
            for images, classes in zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        ]

    def _loss(self, replica: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
        with self.autocast():  # here, because threads do not inherit autocast's data type
            return self.loss_function(replica(inputs), targets)
