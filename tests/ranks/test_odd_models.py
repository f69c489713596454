"""Models that people bring, trained by real ranks."""

from __future__ import annotations

import pytest

from ddpperf.specs import MessagesSpec, TrainingSpec
from ddpperf.specs.training_step import Strategy
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from tests.odd_models import ODD_MODELS


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("lazy", "ddp"), ("lazy", "fsdp"), ("checkpointed", "own_ddp")],
)
def test_odd_model_is_trained(two_ranks: Pool, name: str, strategy: Strategy) -> None:
    """The parameters of all ranks are equal afterwards, which the measurement checks."""
    spec = TrainingSpec(model=ODD_MODELS[name], world_size=2, per_rank_batch_size=8, strategy=strategy)
    assert two_ranks.measure(spec).iterations > 1


def test_messages_of_a_model_are_its_own(two_ranks: Pool) -> None:
    """They are neither parameters nor gradients, although they are sent in the same parts of a step."""
    spec = MessagesSpec(
        model=ODD_MODELS["communicating"], world_size=2, per_rank_batch_size=8, strategy="ddp"
    )
    (sample,) = two_ranks.measure(spec).samples
    sent = {name: values[0] for name, values in sample.counters.items()}
    assert (sent["model: messages"], sent["model: bytes"]) == (3, 2 * 2 * 8 * 64 * 4 + 4)
    assert sent["gradients: bytes"] == sent["parameter_bytes"] == 4 * (33 * 64 + 65 * 10)
    assert not [name for name in sent if "other" in name or name.startswith("parameters:")]


def test_fsdp_refuses_a_model_with_unused_parameters(two_ranks: Pool) -> None:
    """If the ranks left out different ones, gloo would abort them."""
    spec = TrainingSpec(model=ODD_MODELS["with_spare"], world_size=2, per_rank_batch_size=8, strategy="fsdp")
    with pytest.raises(
        SetFailure, match=r"fsdp needs a gradient of each .* got none of 0\.spare\.weight; use"
    ):
        two_ranks.measure(spec)
