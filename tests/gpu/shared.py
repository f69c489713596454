"""Specs of steps on one and on two GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpperf.specs import TrainingSpec

GPU = torch.device("cuda", 0)
ALONE = TrainingSpec(
    world_size=1,
    per_rank_batch_size=32,
    strategy="single",
    model="resnet18_cifar",
    precision="bf16",
    memory_format="channels_last",
    execution="graph",
    input="device",
    epoch_images=32 * 512,
)
DDP = replace(
    ALONE, world_size=2, strategy="ddp", comm_hook="avg", gradient_as_bucket_view=True, buffer_sync=False
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
