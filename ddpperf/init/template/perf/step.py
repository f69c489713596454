"""The training step that test_step.py measures. Put your own model, data and optimizer here."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_step(rank, world_size, batch_size, device):
    """Build the model on one rank, and return a function that trains one step."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # each rank has its own batch
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch_size,), device=device)

    def train_step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return train_step
