"""Train steps whose collectives are recorded, and count the messages and bytes of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from ddpperf.measuring.message_ledger import Ledger, Message
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement


class CountedSteps(TrainingMeasurement):
    """Measurement in which each step trains one batch and records every collective of the training.

    Each step ends with an all_reduce that averages the loss over all ranks. DDP sends gradients
    only, so that otherwise every rank would know only its own loss.
    ledger: the ledger that has recorded how the training was built. The training tells this ledger
    when each part of a step begins.
    sizes: the counters parameter_bytes, and gradient_bytes if gradients are sent by all_reduces.
    own: the messages of the model itself in a step, which get the kind "model".
    """

    max_iterations = 1

    def __init__(
        self, training: MeasuredStep, ledger: Ledger, sizes: dict[str, float], own: Sequence[Message] = ()
    ) -> None:
        super().__init__(training)
        self.own = own
        self.ledger = ledger
        self.start, ledger.messages = ledger.messages, []
        self.sizes = sizes

    def step(self) -> None:
        self.ledger.messages, self.ledger.phase = [], "data"
        with self.ledger:
            self.training.step()
            self.ledger.phase = "metrics"
            dist.all_reduce(self.training.training.loss / dist.get_world_size())

    def finish(self) -> dict[str, float]:
        """Return how many messages and bytes of each kind the start and the last step sent.

        The counters "bucket 0: bytes", "bucket 1: bytes" and so on are the bytes of each message with
        gradients. The counters in `sizes` are added.
        """
        counters, rest, sent = dict(self.sizes), Counter(self.own), list[Message]()
        for message in self.ledger.messages:
            is_own = rest[message] > 0
            rest[message] -= is_own
            sent.append(message._replace(kind="model") if is_own else message)
        for prefix, messages in (("start ", self.start), ("", sent)):
            for kind in {message.kind for message in messages}:
                sizes = [message.nbytes for message in messages if message.kind == kind]
                counters[f"{prefix}{kind}: messages"] = float(len(sizes))
                counters[f"{prefix}{kind}: bytes"] = float(sum(sizes))
        buckets = [message.nbytes for message in sent if message.kind == "gradients"]
        return counters | {f"bucket {number}: bytes": float(each) for number, each in enumerate(buckets)}
