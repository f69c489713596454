"""Models that people bring, trained by real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ddpperf.specs import FUNCTIONS_VARIABLE, MessagesSpec, TrainingSpec
from ddpperf.specs.training_step import Strategy
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

MODELS = {
    name: f"tests.odd_models:{name}"
    for name in ("lazy", "checkpointed", "set_by_first_batch", "communicating")
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    options = SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=120)
    with Pool(options, sides=[Side(environment={FUNCTIONS_VARIABLE: ",".join(MODELS.values())})]) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("lazy", "ddp"), ("lazy", "fsdp"), ("checkpointed", "own_ddp")],
)
def test_odd_model_is_trained(pool: Pool, name: str, strategy: Strategy) -> None:
    """The parameters of all ranks are equal afterwards, which the measurement checks."""
    spec = TrainingSpec(model=MODELS[name], world_size=2, per_rank_batch_size=8, strategy=strategy)
    assert pool.measure(spec).iterations > 1


def test_messages_of_a_model_are_its_own(pool: Pool) -> None:
    """They are neither parameters nor gradients, although they are sent in the same parts of a step."""
    spec = MessagesSpec(model=MODELS["communicating"], world_size=2, per_rank_batch_size=8, strategy="ddp")
    (sample,) = pool.measure(spec).samples
    sent = {name: values[0] for name, values in sample.counters.items()}
    assert (sent["model: messages"], sent["model: bytes"]) == (2, 2 * 2 * 8 * 64 * 4)
    assert sent["gradients: bytes"] == sent["parameter_bytes"] == 4 * (33 * 64 + 65 * 10)
    assert not [name for name in sent if "other" in name or name.startswith("parameters:")]


def test_parameter_set_by_the_first_batch_is_explained(pool: Pool) -> None:
    spec = TrainingSpec(
        model=MODELS["set_by_first_batch"], world_size=2, per_rank_batch_size=8, strategy="ddp"
    )
    what = "sets its parameter scale in its first forward pass, each rank from its own batch; set it before"
    with pytest.raises(SetFailure, match=re.escape(what)) as failed:
        pool.measure(spec)
    assert failed.value.sides == {"A"}
