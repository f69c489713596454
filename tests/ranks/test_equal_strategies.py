"""Strategies on two real ranks train like one process that has the images of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpperf.machine.compiler import compiler_reason
from tests.two_ranks import (
    COMPILED,
    RANKS,
    STEPS,
    VARIANTS,
    Ranks,
    Trained,
    normalized_by_batch,
    normalized_by_group,
    train,
    train_as_rank,
)

EXACT = [name for name in VARIANTS if "16" not in name]
COMPRESSED = [name for name in VARIANTS if "16" in name]


def train_pair(folder: Path, *, compiled: bool) -> list[Ranks]:
    """Train all variants on one pair of processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.multiprocessing.spawn(train_as_rank, (folder, compiled), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ranks]:
    return train_pair(tmp_path_factory.mktemp("ranks"), compiled=False)


@pytest.fixture(scope="module")
def compiled_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ranks]:
    return train_pair(tmp_path_factory.mktemp("compiled"), compiled=True)


@pytest.fixture(scope="module")
def alone() -> Trained:
    """What one process trained on the images of both ranks."""
    return train(normalized_by_group, 0, world_size=1, strategy="single", per_rank_batch_size=8)


def assert_same_parameters(ours: Trained, theirs: Trained) -> None:
    """Compare with a tolerance of float32's rounding of each parameter's largest value."""
    for one, other in zip(ours["parameters"], theirs["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * other.abs().max().item())


def assert_same_bits(ours: Trained, theirs: Trained) -> None:
    pairs = zip(ours["parameters"], theirs["parameters"], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def error(ours: Trained, theirs: Trained) -> float:
    """Return the distance of the parameters as a fraction of the distance that they moved."""
    apart, moved = (
        sum(
            float((one - other).square().sum()) for one, other in zip(some, theirs["parameters"], strict=True)
        )
        for some in (ours["parameters"], theirs["before"])
    )
    return math.sqrt(apart / moved)


def gradients_of(ranks: list[Ranks], name: str) -> list[list[Any]]:
    """Return the first parameter's gradient on both ranks, after each part of each step."""
    return [list(both) for both in zip(*(by_group[name]["gradients"] for by_group, _ in ranks), strict=True)]


def size(trained: Trained) -> int:
    return sum(parameter.numel() for parameter in trained["parameters"])


# --- each image normalized by itself: the batch of both ranks is one batch


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_equal_the_whole_batch(alone: Trained, parts: int) -> None:
    fields: dict[str, Any] = {"world_size": 1, "strategy": "single", "per_rank_batch_size": 8}
    in_parts = train(normalized_by_group, 0, **fields, accumulation_steps=parts)
    assert len(in_parts["gradients"]) == parts * STEPS
    assert_same_parameters(in_parts, alone)
    torch.testing.assert_close(in_parts["loss"], alone["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_train_like_one_process(ranks: list[Ranks], alone: Trained, name: str) -> None:
    for by_group, _ in ranks:
        assert by_group[name]["compiled_calls"] == 0
        assert_same_parameters(by_group[name], alone)
        assert error(by_group[name], alone) < 5e-6
    losses = torch.stack([by_group[name]["loss"] for by_group, _ in ranks])
    torch.testing.assert_close(losses.mean(), alone["loss"], rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_strategy_compiles_the_whole_model(
    compiled_ranks: list[Ranks], alone: Trained, name: str
) -> None:
    """Inside of DDP torch skips its own modules, and would train them eagerly without a warning."""
    layers = len(list(normalized_by_group("").children()))
    one, other = (by_group[name] for by_group, _ in compiled_ranks)
    assert_same_bits(one, other)
    assert one["words"] == other["words"] == name.split("-")[0]
    for trained in (one, other):
        assert_same_parameters(trained, alone)
        assert trained["compiled_calls"] > layers
        assert trained["compiled_parts"] == 2 if "own_ddp" in name else trained["compiled_parts"] >= 1
        assert trained["counters"]["gradient_bytes"] == 4 * size(trained)
    torch.testing.assert_close((one["loss"] + other["loss"]) / 2, alone["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_differ_by_rounding(ranks: list[Ranks], alone: Trained, name: str) -> None:
    """Gradients and their sum are rounded by at most half an epsilon; float32 would give 6e-8."""
    epsilon = torch.finfo(torch.bfloat16 if "bf16" in name else torch.float16).eps
    for by_group, _ in ranks:
        assert epsilon / 20 < error(by_group[name], alone) < epsilon / 2


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ranks_end_with_the_same_bits(ranks: list[Ranks], name: str) -> None:
    one, other = (by_group[name] for by_group, _ in ranks)
    assert_same_bits(one, other)
    assert one["loss"] != other["loss"], "the ranks have different images"
    assert one["words"] == other["words"] == name


@pytest.mark.parametrize("name", VARIANTS)
def test_sent_bytes_are_those_of_the_sent_type(ranks: list[Ranks], name: str) -> None:
    for by_group, _ in ranks:
        sent = None if name.startswith("fsdp") else (2 if "16" in name else 4) * size(by_group[name])
        assert by_group[name]["counters"].get("gradient_bytes") == sent


@pytest.mark.parametrize("name", [name for name in VARIANTS if "accumulate" in name])
def test_only_the_last_part_of_a_batch_synchronizes(ranks: list[Ranks], name: str) -> None:
    """Before that the ranks' gradients differ; fsdp has not sharded its gradients yet."""
    for first, last in zip(*(gradients_of(ranks, name)[start::2] for start in (0, 1)), strict=True):
        assert first == [None, None] if name.startswith("fsdp") else not torch.equal(*first)
        assert torch.equal(*last)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "accumulate" not in name])
def test_a_whole_batch_synchronizes_in_each_step(ranks: list[Ranks], name: str) -> None:
    gradients = gradients_of(ranks, name)
    assert len(gradients) == STEPS
    assert all(torch.equal(*both) for both in gradients)


def test_zero1_and_fsdp_shard_what_ddp_replicates(ranks: list[Ranks]) -> None:
    for name in VARIANTS:
        held, momentum = ([by_group[name][what] for by_group, _ in ranks] for what in ("held", "momentum"))
        everything = size(ranks[0][0][name])
        assert sum(held) == (everything if name.startswith("fsdp") else 2 * everything)
        assert sum(momentum) == (2 * everything if "ddp" in name else everything)
        assert max(momentum) == everything if "ddp" in name else 0 < min(momentum) < everything


def test_ddp_has_the_requested_options(ranks: list[Ranks]) -> None:
    for by_group, _ in ranks:
        assert [name for name in VARIANTS if by_group[name]["static"]] == ["ddp+static"]
        buckets = {
            name: trained["gradient_storages"]
            for name, trained in by_group.items()
            if not name.startswith("fsdp")
        }
        each, views, small_views = (
            buckets["ddp"],
            buckets["ddp+view"],
            buckets["ddp+bucket1+view+accumulate2"],
        )
        assert each == len(by_group["ddp"]["parameters"]) > small_views > views
        views_of = {name for name in buckets if "view" in name or name.startswith("own_ddp")}
        assert {name for name, storages in buckets.items() if storages < each} == views_of
        assert buckets["own_ddp"] == 3, "the last layers, the hidden layer, the rest"


# --- each image normalized by its rank's batch


def test_batch_statistics_make_two_ranks_differ_from_one(ranks: list[Ranks]) -> None:
    """Shows that these comparisons can tell two trainings apart."""
    one_process = train(normalized_by_batch, 0, world_size=1, strategy="single", per_rank_batch_size=8)
    assert error(ranks[0][1]["ddp"], one_process) > 0.01


def test_buffers_drift_apart_without_synchronization(ranks: list[Ranks]) -> None:
    """Synchronized gradients keep parameters equal, but not BatchNorm's statistics."""
    one, other = (by_batch["ddp+no_buffer_sync"] for _, by_batch in ranks)
    assert_same_bits(one, other)
    apart = [
        float((first - second).norm()) for first, second in zip(one["buffers"], other["buffers"], strict=True)
    ]
    assert apart[0] == 0
    assert all(drift > 0 for drift in apart[1:])
    assert apart[-1] > apart[1], "further with each step"
    assert one["loss"] != other["loss"]


def test_fsdp_equals_ddp_without_buffer_synchronization(ranks: list[Ranks]) -> None:
    for _, by_batch in ranks:
        assert_same_parameters(by_batch["fsdp"], by_batch["ddp+no_buffer_sync"])
        assert_same_parameters(by_batch["ddp"], by_batch["ddp+no_buffer_sync"])
        for ours, theirs in zip(
            by_batch["fsdp"]["buffers"], by_batch["ddp+no_buffer_sync"]["buffers"], strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "equal"), [("ddp", True), ("ddp+no_buffer_sync", False), ("fsdp", False)])
def test_synchronized_buffers_are_those_of_rank_0(ranks: list[Ranks], name: str, equal: bool) -> None:
    first, *later = zip(*(by_batch[name]["buffers"] for _, by_batch in ranks), strict=True)
    assert torch.equal(*first), "they begin with the same"
    assert len(later) == STEPS - 1
    assert [torch.equal(*both) for both in later] == [equal] * len(later)
