"""Strategies by two real ranks: they train what one process trains on the images of both, however they synchronize."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddpperf.machine.compiler import compiler_reason
from tests.two_ranks import (
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ranks]:
    """What each of two ranks trained by GroupNorm and by BatchNorm, all in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.multiprocessing.spawn(train_as_rank, (folder,), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> Trained:
    """One process with the images of both ranks."""
    return train(normalized_by_group, 0, world_size=1, strategy="single", per_rank_batch_size=8)


def assert_same_parameters(ours: Trained, theirs: Trained) -> None:
    """Up to a float32's rounding, of each parameter's greatest value."""
    for one, other in zip(ours["parameters"], theirs["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * other.abs().max().item())


def error(ours: Trained, theirs: Trained) -> float:
    """How far the parameters are apart, as a share of the way that they went."""
    apart, moved = (
        sum(
            float((one - other).square().sum()) for one, other in zip(some, theirs["parameters"], strict=True)
        )
        for some in (ours["parameters"], theirs["before"])
    )
    return math.sqrt(apart / moved)


def gradients_of(ranks: list[Ranks], name: str) -> list[list[Any]]:
    """The first parameter's gradient on both ranks, after each part of each step."""
    return [list(both) for both in zip(*(by_group[name]["gradients"] for by_group, _ in ranks), strict=True)]


def size(trained: Trained) -> int:
    return sum(parameter.numel() for parameter in trained["parameters"])


# --- each image normalized by itself: the batch of both ranks is one batch


@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_is_the_batch(alone: Trained, parts: int) -> None:
    fields: dict[str, Any] = {"world_size": 1, "strategy": "single", "per_rank_batch_size": 8}
    in_parts = train(normalized_by_group, 0, **fields, accumulation_steps=parts)
    assert len(in_parts["gradients"]) == parts * STEPS
    assert_same_parameters(in_parts, alone)
    torch.testing.assert_close(in_parts["loss"], alone["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_train_what_one_process_trains_on_the_images_of_both(
    ranks: list[Ranks], alone: Trained, name: str
) -> None:
    for by_group, _ in ranks:
        assert_same_parameters(by_group[name], alone)
        assert error(by_group[name], alone) < 5e-6
    losses = torch.stack([by_group[name]["loss"] for by_group, _ in ranks])
    torch.testing.assert_close(losses.mean(), alone["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not compiler_reason()])
def test_a_compiled_form_compiles_all_of_the_model_and_an_own_ddps_in_two_parts(
    ranks: list[Ranks], name: str
) -> None:
    """Inside of DDP torch passes over its own modules, and would train them eagerly, without a word."""
    layers = len(list(normalized_by_group("").children()))
    for by_group, _ in ranks:
        calls, parts = by_group[name]["compiled_calls"], by_group[name]["compiled_parts"]
        assert calls > layers if "compile" in name else calls == 0
        assert parts == 2 if "own_ddp" in name and "compile" in name else parts >= ("compile" in name)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_differ_by_their_types_rounding(
    ranks: list[Ranks], alone: Trained, name: str
) -> None:
    """Each rank's gradient is rounded, and their sum once more, each time by at most half of the type's epsilon, mostly by
    less, and one up, another down; if nothing were rounded there would be a float32's 6e-8 only."""
    epsilon = torch.finfo(torch.bfloat16 if "bf16" in name else torch.float16).eps
    for by_group, _ in ranks:
        assert epsilon / 20 < error(by_group[name], alone) < epsilon / 2


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ranks_end_with_the_same_bits(ranks: list[Ranks], name: str) -> None:
    one, other = (by_group[name] for by_group, _ in ranks)
    assert all(
        torch.equal(first, second)
        for first, second in zip(one["parameters"], other["parameters"], strict=True)
    )
    assert one["loss"] != other["loss"], "each had images of its own"
    assert f"-{name}-" in one["id"] == other["id"]


@pytest.mark.parametrize("name", VARIANTS)
def test_what_ddp_sends_is_counted_in_the_type_that_it_is_sent_in(ranks: list[Ranks], name: str) -> None:
    for by_group, _ in ranks:
        sent = None if name.startswith("fsdp") else (2 if "16" in name else 4) * size(by_group[name])
        assert by_group[name]["counters"].get("gradient_bytes") == sent


@pytest.mark.parametrize("name", [name for name in VARIANTS if "accumulate" in name])
def test_only_a_batchs_last_part_synchronizes(ranks: list[Ranks], name: str) -> None:
    """Before that each rank has gradients of its own, by fsdp such as belong to no shard yet."""
    for first, last in zip(*(gradients_of(ranks, name)[start::2] for start in (0, 1)), strict=True):
        assert first == [None, None] if name.startswith("fsdp") else not torch.equal(*first)
        assert torch.equal(*last)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "accumulate" not in name])
def test_a_whole_batch_synchronizes_in_each_step(ranks: list[Ranks], name: str) -> None:
    gradients = gradients_of(ranks, name)
    assert len(gradients) == STEPS
    assert all(torch.equal(*both) for both in gradients)


def test_zero1_and_fsdp_share_what_ddp_holds_on_every_rank(ranks: list[Ranks]) -> None:
    for name in VARIANTS:
        held, momentum = ([by_group[name][what] for by_group, _ in ranks] for what in ("held", "momentum"))
        everything = size(ranks[0][0][name])
        assert sum(held) == (everything if name.startswith("fsdp") else 2 * everything)
        assert sum(momentum) == (2 * everything if "ddp" in name else everything)
        assert max(momentum) == everything if "ddp" in name else 0 < min(momentum) < everything


def test_ddp_has_the_options_asked_for(ranks: list[Ranks]) -> None:
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
            buckets["ddp+bucket=1+view+accumulate=2"],
        )
        assert each == len(by_group["ddp"]["parameters"]) > small_views > views
        views_of = {name for name in buckets if "view" in name or name.startswith("own_ddp")}
        assert {name for name, storages in buckets.items() if storages < each} == views_of
        assert buckets["own_ddp"] == 3, "of 5 MB: the last layers', the hidden one's, and the rest"


# --- each image normalized by its rank's batch


def test_normalized_by_batch_two_ranks_train_otherwise_than_one_process(ranks: list[Ranks]) -> None:
    """Or these comparisons could not tell one training from another."""
    one_process = train(normalized_by_batch, 0, world_size=1, strategy="single", per_rank_batch_size=8)
    assert error(ranks[0][1]["ddp"], one_process) > 0.01


def test_gradients_are_not_enough(ranks: list[Ranks]) -> None:
    """They keep the parameters equal, bit for bit. What a rank keeps of its own images drifts apart: BatchNorm's statistics,
    and the loss, whose mean over the ranks only is that of the whole batch (as the test of one process above says)."""
    one, other = (by_batch["ddp+no_buffer_sync"] for _, by_batch in ranks)
    assert all(
        torch.equal(first, second)
        for first, second in zip(one["parameters"], other["parameters"], strict=True)
    )
    apart = [
        float((first - second).norm()) for first, second in zip(one["buffers"], other["buffers"], strict=True)
    ]
    assert apart[0] == 0
    assert all(drift > 0 for drift in apart[1:])
    assert apart[-1] > apart[1], "further with each step"
    assert one["loss"] != other["loss"]


def test_fsdp_is_ddp_without_the_first_ranks_buffers(ranks: list[Ranks]) -> None:
    for _, by_batch in ranks:
        assert_same_parameters(by_batch["fsdp"], by_batch["ddp+no_buffer_sync"])
        assert_same_parameters(by_batch["ddp"], by_batch["ddp+no_buffer_sync"])
        for ours, theirs in zip(
            by_batch["fsdp"]["buffers"], by_batch["ddp+no_buffer_sync"]["buffers"], strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "equal"), [("ddp", True), ("ddp+no_buffer_sync", False), ("fsdp", False)])
def test_the_ranks_step_with_the_first_ones_buffers_where_those_are_synchronized(
    ranks: list[Ranks], name: str, equal: bool
) -> None:
    first, *later = zip(*(by_batch[name]["buffers"] for _, by_batch in ranks), strict=True)
    assert torch.equal(*first), "they begin with the same"
    assert len(later) == STEPS - 1
    assert [torch.equal(*both) for both in later] == [equal] * len(later)
