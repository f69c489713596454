"""OwnDDP on one rank: buckets, their order and layout. Two ranks are in test_equal_strategies."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpperf.errors import CannotTrain
from ddpperf.specs import Execution, TrainingSpec
from ddpperf.training import own_ddp
from ddpperf.training.own_ddp import Bucket, OwnDDP, all_reduce_of, divided

CPU = torch.device("cpu")
MIB = 2**20


def spec(bucket_cap_mb: int = 0, execution: Execution = "eager") -> TrainingSpec:
    by: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": 8, "strategy": "own_ddp"}
    return TrainingSpec(**by, execution=execution, bucket_cap_mb=bucket_cap_mb)


def layers() -> nn.Sequential:
    """Return parameters of 4 MiB."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


@pytest.mark.parametrize(
    ("mib", "asked", "together"),
    [
        ([64, 32, 16, 8, 8], spec(), [64, 32, 16, 8, 8]),
        ([8] * 8, spec(), [24, 16, 8, 8, 8]),
        ([0.25] * 8, spec(), [1, 0.5, 0.5]),
        ([0.25, 16, 16], spec(), [16.25, 16]),
        ([8] * 8, spec(bucket_cap_mb=20), [16, 16, 16, 16]),
        ([8] * 8, spec(execution="compile"), [32, 32]),
        ([1, 48, 1, 1], spec(execution="compile"), [49, 2]),
        ([8] * 8, spec(bucket_cap_mb=20, execution="compile"), [16, 16, 16, 16]),
    ],
)
def test_buckets_are_made_by_bytes(mib: list[float], asked: TrainingSpec, together: list[float]) -> None:
    parameters = [nn.Parameter(torch.empty(int(each * MIB / 4), device="meta")) for each in mib]
    buckets = list(divided(parameters, asked))
    assert [parameter for bucket in buckets for parameter in bucket] == parameters
    assert [sum(each.nbytes for each in bucket) / MIB for bucket in buckets] == together


@pytest.mark.parametrize(
    ("count", "dtype", "is_last", "by"),
    [
        (2**18, torch.float32, True, "LowLatency"),
        (25 * 2**18, torch.float32, True, "LowLatency"),
        (25 * 2**18 + 4, torch.float32, True, "two_shot"),
        (2**18, torch.bfloat16, True, "two_shot"),
        (2**18, torch.float16, True, "CopyEngines"),
        (2**19, torch.float32, False, "two_shot"),
        (2**19 + 4, torch.float32, False, "CopyEngines"),
    ],
)
def test_a_bucket_is_summed_in_the_fastest_way(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype, is_last: bool, by: str
) -> None:
    """A kernel that needs many multiprocessors would delay the backward pass, except for the last bucket."""
    pytest.importorskip("triton")
    bucket, calls = torch.empty(count, dtype=dtype, device="meta"), list[tuple[str, set[Tensor]]]()

    def recorded(name: str) -> Any:
        return lambda *tensors: SimpleNamespace(sum=lambda: calls.append((name, set(tensors))))

    monkeypatch.setattr("ddpperf.collectives.low_latency.LowLatency", recorded("LowLatency"))
    monkeypatch.setattr(own_ddp, "CopyEngines", recorded("CopyEngines"))
    monkeypatch.setattr(own_ddp, "two_shot", lambda tensor: calls.append(("two_shot", {tensor})))
    all_reduce_of(bucket, is_last)()
    assert calls == [(by, {bucket})]


def test_a_bucket_has_gradients_of_one_type() -> None:
    types = (torch.float32, torch.float16, torch.float32)
    first, other, last = (nn.Parameter(torch.empty(4, dtype=dtype)) for dtype in types)
    assert list(divided([first, other, last], spec())) == [[first, last], [other]]


@pytest.mark.usefixtures("group")
def test_a_bucket_is_sent_after_its_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step sends all buckets at its end, when their order is known."""
    model = OwnDDP(layers(), spec(bucket_cap_mb=8), CPU)
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def noted(buffer: Tensor, **options: Any) -> Any:
        sent.append(sum(each.grad is not None for each in model.parameters()))
        return all_reduce(buffer, **options)

    monkeypatch.setattr(dist, "all_reduce", noted)
    for expected in ([4, 4], [2, 4]):
        sent.clear()
        model.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        assert sent == expected
    last, first = model.buckets
    assert [*last.parameters] == [*model.parameters()][:1:-1], "the last layers' gradients come first"
    assert [*first.parameters] == [*model.parameters()][1::-1]


@pytest.mark.usefixtures("group")
def test_gradients_are_laid_out_like_parameters() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.Conv2d(5, 7, 3, bias=False))
    convolutions.to(memory_format=torch.channels_last)
    inputs = torch.randn(2, 3, 8, 8)
    convolutions(inputs).square().mean().backward()
    alone = [each.grad for each in convolutions.parameters()]
    convolutions.zero_grad()
    OwnDDP(convolutions, spec(), CPU)(inputs).square().mean().backward()
    for parameter, gradient in zip(convolutions.parameters(), alone, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.usefixtures("group")
def test_buckets_are_sent_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks would add up different buckets."""
    model = OwnDDP(layers(), spec(bucket_cap_mb=4), CPU)
    model(torch.ones(1, 1024)).sum().backward()
    sent: list[Bucket] = []
    monkeypatch.setattr(Bucket, "sum", lambda bucket: sent.append(bucket))
    monkeypatch.setattr(Bucket, "fill", lambda bucket: None)
    model.zero_grad()
    first, second, *later = model.buckets
    for bucket in (second, *later, first):
        model._arrive(bucket.parameters[0])
        assert sent == ([] if bucket is not first else model.buckets)


@pytest.mark.usefixtures("group")
def test_an_unused_model_is_freed() -> None:
    model = OwnDDP(layers(), spec(), CPU)
    model(torch.ones(1, 1024)).sum().backward()
    held = [weakref.ref(each) for each in (model, model.buckets[0].flat, next(model.parameters()))]
    del model
    gc.collect()
    assert [each() for each in held] == [None, None, None]


@pytest.mark.usefixtures("group")
def test_a_parameter_without_gradient_is_refused() -> None:
    model = OwnDDP(layers(), spec(), CPU)
    next(model.parameters()).requires_grad_(False)
    model(torch.ones(1, 1024)).sum().backward()
    with pytest.raises(
        CannotTrain,
        match=re.escape("a gradient of each parameter in each step, got none of 0.weight; use all"),
    ):
        model(torch.ones(1, 1024))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("places", [[1], [0, 2], [0, 1, 2]], ids=["middle", "both ends", "all"])
def test_backward_passes_of_reentrant_checkpoints_have_one_end(places: list[int]) -> None:
    """Each checkpoint runs a backward pass within the backward pass, whose end is not the step's."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(self):
                x = checkpoint(layer, x, use_reentrant=True) if place in places else layer(x)
            return x

    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model = OwnDDP(Checkpointed(*copy.deepcopy(plain)), spec(), CPU)
    x = torch.ones(1, 64, requires_grad=True)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        plain(x).square().sum().backward()
        model(x).square().sum().backward()
        assert not model.arrived
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.usefixtures("group")
def test_second_gradient_of_a_parameter_is_refused() -> None:
    """Its bucket may be on its way: on two ranks, the sums were wrong and differed."""

    class Shared(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
            again: Tensor = checkpoint(self[1], x, use_reentrant=True)
            return again

    model = OwnDDP(Shared(nn.Linear(64, 64), nn.Linear(64, 64)), spec(), CPU)
    with pytest.raises(CannotTrain, match=r"got two of 1\.(weight|bias); use use_reentrant=False"):
        model(torch.ones(1, 64)).square().sum().backward()


@pytest.mark.usefixtures("group")
def test_gradients_are_aligned_to_16_bytes_without_gaps() -> None:
    model = OwnDDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 8), nn.Linear(8, 4)), spec(), CPU)
    model(torch.ones(1, 5)).sum().backward()
    (bucket,) = model.buckets
    assert bucket.flat.numel() == sum(each.numel() for each in model.parameters())
    misaligned = [
        each.shape for each in model.parameters() if each.grad is not None and each.grad.data_ptr() % 16
    ]
    assert misaligned in ([(3,)], [(3, 5)]), (
        "one of the two that are no multiples of 16 bytes, behind the other"
    )
