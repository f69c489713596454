"""Times a plain training loop in the ways that reports time it, right and wrong.

    PYTHONPATH=. python tools/plain_timing.py > docs/plain_timing/HARDWARE.json

The loop does not use the measurements of ddpperf: it is the loop of a tutorial, on one device. First
it times whole epochs with a DataLoader in a fresh process, then the steps on one batch.
tools/update_docs.py makes a table of docs/reports.md from the results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.hardware import hardware_key
from ddpperf.training.models import build

PARTS = ("forward", "backward", "optimizer")
# When the loop waits for the device: never, with loss.item() in each step, after each part, or only
# before the clock starts and before it stops. A GPU computes after the call that started the work
# returned.
WAYS = ("never", "loss.item()", "each part", "at both ends")
REPEATS = 7  # of all ways in turn; the shortest times are stored, because other programs only add time


def main() -> None:
    if torch.cuda.is_available():
        found = measure("cuda", "resnet18_cifar", batch_sizes=(32, 128, 512), steps=20, images=12_800)
    else:
        torch.set_num_threads(1)
        found = measure("cpu", "resnet10_cifar", batch_sizes=(32, 128), steps=4, images=1_280)
    json.dump(found, sys.stdout, indent=1)
    print()


def measure(
    device: str, model: str, *, batch_sizes: Sequence[int], steps: int, images: int, workers: int = 2
) -> dict[str, Any]:
    """Time five epochs and the steps of each batch size; return the seconds for a JSON file."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    network = build(model).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    epochs = epoch_seconds(network, optimizer, device, images, workers)
    return {
        "hardware": hardware_key(device, visible_gpus() if device == "cuda" else ()),
        "torch": torch.__version__,
        "model": model,
        "epochs": {"images": images, "batch_size": 128, "workers": workers, "seconds": epochs},
        "steps": [step_seconds(network, optimizer, device, size, steps) for size in batch_sizes],
    }


def epoch_seconds(
    network: nn.Module, optimizer: torch.optim.Optimizer, device: str, images: int, workers: int
) -> list[float]:
    """Return the seconds of the first five epochs of a process, each with a new set of workers."""
    data = TensorDataset(torch.rand(images, 3, 32, 32), torch.randint(10, (images,)))
    loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=workers, pin_memory=device == "cuda")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for pixels, labels in loader:
            optimizer.zero_grad()
            cross_entropy(network(pixels.to(device)), labels.to(device)).backward()
            optimizer.step()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def step_seconds(
    network: nn.Module, optimizer: torch.optim.Optimizer, device: str, batch_size: int, steps: int
) -> dict[str, Any]:
    """Return the seconds of a step and of its parts, by each of WAYS."""
    pixels = torch.rand(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    loop(network, optimizer, pixels, labels, 5, "each part")  # to warm up
    times: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(REPEATS):
        for way, found in times.items():
            wait(device)
            start = time.perf_counter()
            parts = loop(network, optimizer, pixels, labels, steps, way)
            if way == "at both ends":
                wait(device)
            found.append({**parts, "step": (time.perf_counter() - start) / steps})
    timed = {
        way: {part: min(parts[part] for parts in found) for part in (*PARTS, "step")}
        for way, found in times.items()
    }
    return {"batch_size": batch_size, "steps": steps, **timed}


def loop(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    pixels: Tensor,
    labels: Tensor,
    steps: int,
    way: str,
) -> dict[str, float]:
    """Run training steps, and return the seconds per step that the clock shows for each part."""
    found = dict.fromkeys(PARTS, 0.0)
    loss = pixels.new_zeros(())

    def clocked(part: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if way == "each part":
            wait(pixels.device.type)
        found[part] += (time.perf_counter() - start) / steps
        return result

    def update() -> None:
        optimizer.step()
        if way == "loss.item()":
            loss.item()

    for _ in range(steps):
        optimizer.zero_grad()
        loss = clocked("forward", lambda: cross_entropy(network(pixels), labels))
        clocked("backward", loss.backward)
        clocked("optimizer", update)
    return found


def wait(device: str) -> None:
    """Wait until the device has computed everything; a CPU has nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
