"""Custom steps and collectives: their specs, and one sentence for each mistake in a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpperf.collectives.calls import custom_collective
from ddpperf.errors import CannotTrain
from ddpperf.plugin.measure_fixture import silent_ranks
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import FUNCTIONS_VARIABLE, CustomCollectiveSpec, CustomStepSpec
from ddpperf.specs.custom import CustomKind, import_function
from ddpperf.training.custom_step import CustomStep

CPU = torch.device("cpu")
STEP = CustomStepSpec(function="own_functions:make", world_size=1, per_rank_batch_size=4)
CALL = CustomCollectiveSpec(function="own_functions:make", world_size=2, nbytes=64)
Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes the module own_functions, whose functions ranks may import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "resnet18,own_functions:make")
    monkeypatch.delitem(sys.modules, "own_functions", raising=False)

    def write(source: str) -> None:
        (tmp_path / "own_functions.py").write_text(source)

    yield write
    sys.modules.pop("own_functions", None)


def made(line: str) -> str:
    """Return a module whose step is the given line."""
    return f"import torch\ndef make(rank, world_size, batch_size, device):\n    {line}\n"


@pytest.mark.parametrize("name", ["", "make", "own:", "own make:x", "own:make:x"])
@pytest.mark.parametrize("spec", [STEP, CALL])
def test_wrong_function_name_is_refused(spec: CustomStepSpec | CustomCollectiveSpec, name: str) -> None:
    with pytest.raises(ValueError, match=r"^function must be package\.module:function, got "):
        replace(spec, function=name)


def test_unlisted_function_is_not_imported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("raise SystemExit('it was imported')")
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "own_functions:other,resnet18")
    with pytest.raises(CannotTrain, match=r"^step own_functions:make was not named when the ranks started; "):
        import_function("own_functions:make", "step")


def test_step_trains_with_its_arguments(write: Write) -> None:
    write(
        "import torch\ncalls = []\n"
        "def make(**given):\n    calls.append(given)\n"
        "    return lambda: calls.append('step') or torch.tensor(2.0)\n"
    )
    step = CustomStep(STEP, rank=3, device=CPU)
    step.warm_up(2)
    step.step()
    step.end_round(1)
    calls: list[Any] = sys.modules["own_functions"].calls
    assert calls == [
        {"rank": 3, "world_size": 1, "batch_size": 4, "device": CPU}, "step", "step", "step"
    ]  # fmt: skip


def test_ranks_begin_with_one_seed(write: Write) -> None:
    write(made("weight = torch.randn(3); return lambda: weight.sum()"))
    steps = [CustomStep(STEP, rank=rank, device=CPU) for rank in (0, 1)]
    for step in steps:
        step.step()
    assert steps[0].loss.item() == steps[1].loss.item()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_step_without_a_finite_loss_fails(write: Write, value: str) -> None:
    write(made(f"return lambda: torch.tensor(float('{value}'))"))
    step = CustomStep(STEP, rank=0, device=CPU)
    step.step()
    with pytest.raises(FloatingPointError, match=rf"^the loss is {value} after a round of 3 steps$"):
        step.end_round(3)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return None", "must return a function, got a value of type NoneType; return a function that"),
        ("return lambda: None", "must return a real tensor with one element, got a value of type NoneType;"),
        ("return lambda: 0.5", "must return a real tensor with one element, got a value of type float;"),
        (
            "return lambda: torch.ones(3)",
            "got a value of type Tensor of shape (3,), torch.float32; return the loss",
        ),
    ],
)
def test_wrong_step_is_one_sentence(write: Write, line: str, found: str) -> None:
    write(made(line))
    with pytest.raises(CannotTrain, match=r"^step own_functions:make [^\n]+; [^\n]+\Z") as refused:
        CustomStep(STEP, rank=0, device=CPU).warm_up(1)
    assert found in str(refused.value)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_wrong_collective_fails_its_check(write: Write, kind: CustomKind) -> None:
    write("def make(*buffers):\n    pass\n")
    with pytest.raises(ArithmeticError, match=r" is wrong: after 1 "):
        timed(kind)


def test_result_must_be_there_when_the_function_returns(write: Write) -> None:
    """A round of many calls would hide that each call returns too early."""
    write(
        "import threading, torch\n"
        "def make(result, source):\n"
        "    rows = torch.cat([torch.arange(8) % 13 + 1.0, torch.arange(8) % 13 + 2.0])\n"
        "    threading.Timer(0.2, lambda: result.copy_(rows)).start()\n"
    )
    with pytest.raises(ArithmeticError, match=r" is wrong: after 1 steps element 0 is -1\.0 where 1\.0 was"):
        timed("all_gather")


@pytest.mark.parametrize(
    ("change", "got"), [(".double()", r"float64 of shape \(16,\)"), ("[:8]", r"float32 of shape \(8,\)")]
)
def test_changed_buffer_is_one_sentence(write: Write, change: str, got: str) -> None:
    write(f"def make(buffer):\n    buffer.data = buffer.data{change}\n")
    with pytest.raises(
        CannotTrain, match=rf"must keep a torch.float32 buffer of shape \(16,\), got torch\.{got};"
    ):
        timed("all_reduce")


def timed(kind: CustomKind) -> None:
    """Run a round of one call on rank 0 of two."""
    spec = CustomCollectiveSpec(function="own_functions:make", kind=kind, world_size=2, nbytes=64)
    call = custom_collective(spec, rank=0, device=CPU)
    call.start_round()
    call.step()
    call.end_round(1)


@pytest.mark.parametrize(("called", "warns"), [(0.0, True), (2.0, False)])
def test_ranks_that_send_nothing_are_a_warning(called: float, warns: bool) -> None:
    several = CustomStepSpec(function="own:f", world_size=2, per_rank_batch_size=4)
    sample = Sample(
        set="A1", side="A", torch="2.14", seconds=((0.1, 0.1),), counters={"collectives": (called, called)}
    )
    found = silent_ranks(Measured(spec=several, iterations=1, samples=(sample,)))
    assert bool(found) == warns
    assert all("wrap the model in DistributedDataParallel" in text for text in found)


@pytest.mark.usefixtures("group")
def test_collectives_of_a_step_are_counted(write: Write) -> None:
    write(made("return lambda: (torch.distributed.all_reduce(torch.ones(2)), torch.ones(1))[1]"))
    several = CustomStepSpec(function="own_functions:make", world_size=2, per_rank_batch_size=4)
    step = CustomStep(several, rank=0, device=CPU)
    step.warm_up(1)
    assert step.finish() == {"collectives": 1.0}
