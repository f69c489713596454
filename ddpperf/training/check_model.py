"""Check whether a model can be trained: python -m ddpperf.training.check_model NAME BATCH_SIZE.

If it cannot, this command prints one sentence and exits with status 1.
"""

from __future__ import annotations

import sys

import torch

from ddpperf.errors import CannotTrain, first_line
from ddpperf.machine.child_process import die_with_parent
from ddpperf.specs import TrainingSpec
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep


def check(name: str, batch_size: int) -> None:
    """Train a model for one step on the CPU, and raise CannotTrain if this fails."""
    torch.set_num_threads(1)
    spec = TrainingSpec(model=name, world_size=1, per_rank_batch_size=batch_size, strategy="single")
    try:
        training = TrainingStep(spec, rank=0, device=torch.device("cpu"))
        step = MeasuredStep(training)
        step.step()
        step.end_round(1)
    except CannotTrain:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CannotTrain(
            f"model {name} cannot be trained ({what}); train it without ddpperf first"
        ) from error
    parameters = training.model.named_parameters()
    if unused := [name for name, weight in parameters if weight.requires_grad and weight.grad is None]:
        what = f"parameters that its loss does not use, for which DDP would wait, such as {unused[0]}"
        raise CannotTrain(f"model {spec.model} has {what}; use them, or set their requires_grad to False")


if __name__ == "__main__":
    die_with_parent()
    try:
        check(sys.argv[1], int(sys.argv[2]))
    except CannotTrain as problem:
        sys.exit(str(problem))
