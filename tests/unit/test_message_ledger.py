"""The ledger records unknown messages, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpperf.instruments.step_trace import messages_of
from ddpperf.measuring.message_ledger import Ledger


@pytest.mark.usefixtures("group")
def test_unknown_messages_are_recorded() -> None:
    values = torch.ones(100)
    with (ledger := Ledger()):
        ledger.phase = "forward"
        dist.all_reduce(values)
        dist.all_gather([torch.empty(100)], values)
        dist.reduce_scatter_tensor(torch.empty(100), values)
        dist.barrier()
    dist.all_reduce(values)
    *sized, barrier = map(tuple, ledger.messages)
    assert sized == [("other", 400), ("parameters", 400), ("other", 400)]
    assert barrier[0] == "control"


@pytest.mark.usefixtures("group")
def test_messages_of_a_step_without_parts_have_no_known_purpose() -> None:
    def step() -> None:
        dist.broadcast(torch.ones(100), 0)

    assert messages_of(step, None, captured=False) == {"other": [1, 400]}


def test_compiled_code_stays_compiled_while_and_after_it_is_watched() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(1)
            return graph.forward(*arguments)

        return run

    step, ones = torch.compile(lambda x: x * 2 + 1, backend=backend), torch.ones(2)
    step(ones)
    with Ledger():
        step(ones)
    step(ones)
    assert len(calls) == 3, "otherwise torch ran it eagerly, and later rounds would measure that"
