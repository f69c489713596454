"""Check a model: python -m ddpperf.training.check_model NAME BATCH_SIZE DEVICE PRECISION DATA DIGEST COUNT.

If it can be trained, the last line of the output is TRAINED. If not, this command prints one sentence
and exits with status 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ddpperf.data.images import load_images
from ddpperf.errors import CannotTrain, first_line
from ddpperf.machine.child_process import die_with_parent
from ddpperf.specs import Precision, TrainingSpec, is_custom_model
from ddpperf.specs.custom import TRAINED
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep


def check(
    name: str, batch_size: int, device: str = "cpu", precision: Precision = "fp32", **images: Any
) -> None:
    """Train a model for two steps on a device, and raise CannotTrain if this fails.

    images: the fields of a TrainingSpec that say which images it is trained on.
    """
    torch.set_num_threads(1)
    fields: dict[str, Any] = {"per_rank_batch_size": batch_size, "precision": precision, **images}
    spec = TrainingSpec(model=name, world_size=1, strategy="single", **fields)
    training: TrainingStep | None = None
    size = ""
    try:
        if not is_custom_model(name):
            size = "x".join(map(str, load_images(spec).pixels.shape[2:]))
        training = TrainingStep(spec, rank=0, device=torch.device(device))
        step = MeasuredStep(training)
        step.step()
        step.end_round(1)
        inputs, before = training.input.batch[0], training.input.batch[0].clone()
        version = inputs._version
        step.step()
        if inputs._version != version and bool((before != inputs).any()):
            what = "changes its inputs in each step, and ddpperf always trains on one batch"
            raise CannotTrain(f"model {name} {what}; leave them as they are, as with sub instead of sub_")
    except CannotTrain:
        raise
    except (Exception, SystemExit) as error:
        named = training.model.named_parameters() if training is not None else ()
        if sparse := [name for name, each in named if each.grad is not None and each.grad.is_sparse]:
            what = f"sparse gradients, such as that of {sparse[0]}, which ddpperf's SGD cannot decay"
            raise CannotTrain(f"model {name} has {what}; use sparse=False") from error
        what = f"on {device} in {precision} ({type(error).__name__}: {first_line(error)})"
        advice = "train it without ddpperf first"
        if size:
            advice = f"the images are {size}: name another model, or other images by --data"
        raise CannotTrain(f"model {name} cannot be trained {what}; {advice}") from error


if __name__ == "__main__":
    die_with_parent()
    try:
        name, batch_size, device, precision, data, digest, count = sys.argv[1:]
        images = {"data": data, "digest": digest, "epoch_images": int(count)}
        check(name, int(batch_size), device, precision, **images)  # type: ignore[arg-type]
    except CannotTrain as problem:
        sys.exit(str(problem))
    print(f"\n{TRAINED}", flush=True)
