"""Whether a model can be trained at all: python -m ddpperf.training.check_model NAME BATCH_SIZE. Says "trained" at the end, or one
sentence, and exits with 1."""

from __future__ import annotations

import sys

import torch

from ddpperf.errors import CannotTrain, first_line
from ddpperf.specs import TrainingSpec
from ddpperf.training.step import TrainingStep


def check(name: str, batch_size: int) -> None:
    """Train one step of the model on the CPU, with a batch of batch_size rows; raises CannotTrain with what is wrong."""
    torch.set_num_threads(1)
    spec = TrainingSpec(model=name, world_size=1, per_rank_batch_size=batch_size, strategy="single")
    try:
        step = TrainingStep(spec, rank=0, device=torch.device("cpu"))
        step.step()
        step.end_round(1)
    except CannotTrain:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CannotTrain(f"model {name} cannot be trained ({what}); try it by itself first") from error
    if unused := [
        each for each, weight in step.model.named_parameters() if weight.requires_grad and weight.grad is None
    ]:
        raise CannotTrain(
            f"model {name} has parameters that its loss does not use, for which DDP would wait, such as {unused[0]}; use them, "
            "or set their requires_grad to False"
        )


if __name__ == "__main__":
    try:
        check(sys.argv[1], int(sys.argv[2]))
        print("trained")
    except CannotTrain as problem:
        sys.exit(str(problem))
