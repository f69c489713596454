"""--executions, --spec and --candidate: which trainings have the fields, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, parameters, possible
from ddpperf.plugin.options.options import GPU_INDUCTOR, Options
from ddpperf.plugin.options.slow_checks import check_compiler
from ddpperf.plugin.options.spec_fields import changed
from ddpperf.specs import Spec, TrainingSpec, from_json, to_json
from perf import test_batch_size, test_execution, test_precision, test_scaling, test_strategies
from tests.command_line import Read, reader

EXPERIMENTS: tuple[Callable[[Options], Iterator[Case]], ...] = (
    test_batch_size.epochs,
    test_batch_size.one_epoch_with_most_workers,
    test_execution.executions,
    test_precision.precisions,
    test_scaling.weak_scaling,
    test_scaling.strong_scaling,
    test_scaling.epochs,
    test_strategies.variants,
)


@pytest.fixture
def read(pytestconfig: pytest.Config) -> Read:
    return reader(pytestconfig)


def spec(*fields: str) -> list[str]:
    return [argument for field in fields for argument in ("--spec", field)]


def step(options: Options, world_size: int, **fields: Any) -> TrainingSpec:
    return options.step(world_size=world_size, per_rank_batch_size=8, **fields)


# --- executions


def test_default_executions_suit_the_device(read: Read) -> None:
    assert (read().executions, read().fastest_execution, read().input) == (("eager",), "eager", "fixed")
    options = read(gpus=2)
    assert (options.executions, options.fastest_execution) == (
        ("graph", "compile+graph", "eager"),
        "compile+graph",
    )
    assert options.input == "device"
    assert read("--device", "cpu", gpus=2).executions == ("eager",)


@pytest.mark.parametrize(
    ("given", "executions", "fastest"),
    [
        ("compile", ("compile",), "compile"),
        ("eager, graph", ("eager", "graph"), "eager"),
        ("graph,compile+graph", ("graph", "compile+graph"), "compile+graph"),
    ],
)
def test_first_execution_is_every_steps(
    read: Read, given: str, executions: tuple[str, ...], fastest: str
) -> None:
    options = read("--executions", given, gpus=2)
    assert (options.executions, options.fastest_execution) == (executions, fastest)
    assert [step(options, size).execution for size in (1, 2)] == [executions[0]] * 2
    assert step(options, 2, execution="eager").execution == "eager", "unless a case has its own"


def test_only_captured_compilation_has_default_compiler_options(read: Read) -> None:
    options = read(gpus=2)
    inductors = {
        execution: step(options, 2, execution=execution).inductor
        for execution in ("eager", "graph", "compile", "compile+graph")
    }
    assert inductors == {"eager": "", "graph": "", "compile": "", "compile+graph": GPU_INDUCTOR}
    assert step(read("--executions", "compile"), 2).inductor == ""


# --- fields of the spec


def test_fields_reach_the_trainings_that_have_them(read: Read) -> None:
    plain, options = (
        read(),
        read(*spec("comm_hook=bf16", "bucket_cap_mb=4", "static_graph=true", "buffer_sync=False")),
    )
    set_fields: dict[str, Any] = {
        "comm_hook": "bf16",
        "bucket_cap_mb": 4,
        "static_graph": True,
        "buffer_sync": False,
    }
    assert step(options, 2) == step(plain, 2, **set_fields)
    assert step(options, 2, strategy="zero1") == step(plain, 2, strategy="zero1", **set_fields)
    assert step(options, 2, comm_hook="fp16") == step(options, 2), "--spec overrides what a case says"
    for strategy in ("fsdp", "data_parallel"):
        assert step(options, 2, strategy=strategy) == step(plain, 2, strategy=strategy)
    assert step(options, 1) == step(plain, 1), "one device has no hook"
    epoch = options.epoch(world_size=2, per_rank_batch_size=8)
    assert (epoch.comm_hook, epoch.bucket_cap_mb, epoch.static_graph, epoch.buffer_sync) == (
        "bf16",
        4,
        True,
        False,
    )


def test_changing_to_own_ddp_keeps_shared_options() -> None:
    ddp = TrainingSpec(
        world_size=2, per_rank_batch_size=8, strategy="ddp", gradient_as_bucket_view=True, bucket_cap_mb=8
    )
    own: dict[str, Any] = {"strategy": "own_ddp", "gradient_as_bucket_view": False}
    by_avg, mapped = (replace(ddp, comm_hook=hook) for hook in ("avg", "symmetric_memory"))
    assert changed(by_avg, {"strategy": "own_ddp"}) == replace(ddp, **own)
    assert changed(mapped, {"strategy": "own_ddp"}) == replace(mapped, **own)
    assert changed(by_avg, {"strategy": "own_ddp", "comm_hook": "symmetric_memory"}) == replace(mapped, **own)
    assert changed(replace(mapped, **own), {"strategy": "ddp"}) == replace(
        mapped, gradient_as_bucket_view=False
    )


def test_own_ddp_has_hook_and_bucket_options(read: Read) -> None:
    options = read(*spec("strategy=own_ddp", "comm_hook=symmetric_memory", "bucket_cap_mb=25"), gpus=2)
    ours = step(options, 2)
    assert (ours.strategy, ours.comm_hook, ours.bucket_cap_mb) == ("own_ddp", "symmetric_memory", 25)
    assert from_json(to_json(ours)) == ours, "25 was a default once, but not of this"


def test_accumulation_is_set_on_one_device_too(read: Read) -> None:
    options = read(*spec("accumulation_steps=2"))
    assert [step(options, size).accumulation_steps for size in (1, 2)] == [2, 2]


def test_strategy_field_is_the_default_of_several_ranks(read: Read) -> None:
    options = read(*spec("strategy=fsdp"))
    assert [step(options, size).strategy for size in (1, 2)] == ["single", "fsdp"]
    assert step(options, 2, strategy="ddp").strategy == "ddp"


def test_sync_batch_norm_needs_a_process_group(read: Read) -> None:
    options = read(*spec("sync_batch_norm=TRUE"), gpus=2)
    assert [step(options, size).sync_batch_norm for size in (1, 2)] == [False, True]
    assert not step(options, 2, strategy="data_parallel", execution="eager").sync_batch_norm
    sharded = step(options, 2, strategy="fsdp", execution="eager")
    assert (sharded.sync_batch_norm, sharded.memory_format) == (True, "contiguous")


@pytest.mark.parametrize("inductor", ["epilogue_fusion", "max_autotune+triton.cooperative_reductions", ""])
def test_compiler_options_are_set_in_compiled_executions(read: Read, inductor: str) -> None:
    options = read(*spec(f"inductor={inductor}"), gpus=2)
    assert {
        step(options, size, execution=execution).inductor
        for size in (1, 2)
        for execution in ("compile", "compile+graph")
    } == {inductor}
    assert {
        step(options, size, execution=execution).inductor
        for size in (1, 2)
        for execution in ("eager", "graph")
    } == {""}


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ((), 0),
        (("--model", "resnet18_cifar", "--batch-sizes", "1", "--global-batch-sizes", "2"), 0),
        (
            (
                "--model",
                "resnet18_cifar",
                "--batch-sizes",
                "4",
                *spec("accumulation_steps=4"),
                "--executions",
                "eager,compile",
            ),
            0,
        ),
        (("--device", "cpu", *spec("comm_hook=bf16", "strategy=zero1")), 4),
        (spec("strategy=fsdp"), 0),
        ((), 4),
        (("--executions", "compile,graph,eager,compile+graph"), 4),
        (("--world-sizes", "1"), 4),
        (spec("comm_hook=avg"), 4),
        (spec("comm_hook=symmetric_memory", "bucket_cap_mb=8", "inductor=shape_padding"), 4),
        (("--executions", "eager", *spec("strategy=fsdp", "sync_batch_norm=true")), 4),
        (("--executions", "compile,eager", *spec("strategy=zero1", "comm_hook=powersgd")), 4),
        (spec("static_graph=true"), 4),
        (spec("accumulation_steps=2"), 4),
    ],
)
def test_every_experiment_has_cases_with_different_ids(
    read: Read, arguments: tuple[str, ...], gpus: int
) -> None:
    options = read(*arguments, gpus=gpus)
    for experiment in EXPERIMENTS:
        marker = pytest.mark.specs(cases=experiment).mark
        parameters(experiment.__name__, marker, options, Machine(device=options.device))
        cases = list(experiment(options))
        if experiment is not test_strategies.variants:
            assert [case for case in cases if isinstance(case, Spec)], experiment


@pytest.mark.parametrize(
    ("batch_size", "gpus", "experiment", "own"),
    [
        ("192", 0, test_batch_size.one_epoch_with_most_workers, 128),
        ("96", 4, test_batch_size.fixed_batches, 32),
    ],
)
def test_indivisible_default_batch_is_skipped(
    read: Read, batch_size: str, gpus: int, experiment: Callable[[Options], Iterator[Any]], own: int
) -> None:
    (case,) = experiment(read("--batch-sizes", batch_size, *spec("accumulation_steps=3"), gpus=gpus))
    assert f"accumulation_steps=3 does not divide a batch of {own} images" in case.marks[0].kwargs["reason"]


# --- refusals

NO_COMPILER = "torch.compile needs a C++ compiler with Python's headers, and"
NUMBER = "takes a whole number from"
REFUSALS = {
    "--executions fast": (
        "--executions: takes eager, compile, graph or compile+graph, got 'fast'; pass for example eager"
    ),
    "--executions eager,": "--executions: takes eager, compile, graph or compile+graph, got ''; pass",
    "--executions eager,eager": "got 'eager,eager', which names a value twice; pass for example graph,eager",
    "--executions graph": (
        "graph is captured by a GPU's driver; this runs on the CPU; pass other --executions or another --spec"
    ),
    "--executions eager,compile+graph": (
        "compile+graph is captured by a GPU's driver; this runs on the CPU; pass other"
    ),
    "--spec comm_hook": "--spec: comm_hook takes none, ",
    "--spec bucket_cap_mb=big": f"--spec: bucket_cap_mb {NUMBER} 0 to 1048576, got 'big'; pass for example 2",
    "--spec bucket_cap_mb=-1": f"--spec: bucket_cap_mb {NUMBER} 0 to 1048576, got '-1'; pass",
    "--spec accumulation_steps=²": f"--spec: accumulation_steps {NUMBER} 1 to 999999999, got '²'; pass",
    "--spec accumulation_steps=1000000000": (
        f"--spec: accumulation_steps {NUMBER} 1 to 999999999, got '1000000000'; pass"
    ),
    "--spec accumulation_steps=0": f"--spec: accumulation_steps {NUMBER} 1 to 999999999, got '0'; pass",
    "--spec static_graph=yes": "--spec: static_graph takes true or false, got 'yes'; pass for example true",
    "--spec comm_hook=int8": (
        "--spec: comm_hook takes none, avg, bf16, fp16, powersgd or symmetric_memory, got 'int8'"
    ),
    "--spec strategy=data_parallel": (
        "--spec: strategy takes ddp, zero1, own_ddp or fsdp, got 'data_parallel'; pass"
    ),
    "--spec comm_hook=avg": (
        "comm_hook avg needs NCCL; this runs on the CPU; pass other --executions or another --spec"
    ),
    "--spec sync_batch_norm=true": "this runs on the CPU; pass other --executions or another --spec",
    "--world-sizes 1 --spec strategy=fsdp": (
        "--spec strategy=fsdp needs several ranks, got --world-sizes 1; pass --world-"
    ),
    "--world-sizes 1 --spec comm_hook=bf16": (
        "--spec comm_hook=bf16 needs several ranks, got --world-sizes 1; pass"
    ),
    "--spec strategy=fsdp --spec comm_hook=bf16": (
        "comm_hook=bf16 is an option of DDP, got strategy fsdp; use ddp or zero1"
    ),
    "--batch-sizes 8 --spec accumulation_steps=3": (
        "accumulation_steps=3 does not divide a batch of 8 images; use a divisor"
    ),
    "--spec static_graph=true --spec accumulation_steps=2": "static_graph does not",
    "--spec inductor=combo_kernels": (
        "--spec inductor=combo_kernels needs a compiled execution, got eager; pass --executions"
    ),
    "--executions compile --spec inductor=a,b": (
        "inductor must be names of torch's inductor options joined by +, got"
    ),
    "--executions compile --spec strategy=fsdp": "compile cannot compile strategy fsdp; use",
    "--candidate execution=graph": ("this runs on the CPU; pass other --executions or another --candidate"),
    "--candidate comm_hook=avg": "this runs on the CPU; pass other --executions or another --candidate",
    "--world-sizes 1 --candidate static_graph=true": (
        "--candidate static_graph=True needs several ranks, got"
    ),
}
GPU_REFUSALS = {
    "--spec comm_hook=powersgd": (
        "graph cannot capture powersgd, which waits for the device where it compresses;"
    ),
    "--spec strategy=fsdp": "graph cannot capture fsdp, whose parameters come and go in every step;",
    "--executions eager --precision fp16 --spec strategy=fsdp": (
        "fp16's gradient scaler checks a rank's own"
    ),
    "--executions eager,graph --spec inductor=a": (
        "--spec inductor=a needs a compiled execution, got eager, graph;"
    ),
}


@pytest.mark.parametrize(("gpus", "line"), [*product([0], REFUSALS), *product([2], GPU_REFUSALS)])
def test_impossible_trainings_are_refused(read: Read, gpus: int, line: str) -> None:
    sentence = re.escape((GPU_REFUSALS if gpus else REFUSALS)[line])
    with pytest.raises((pytest.UsageError, Refused), match=sentence):
        read(*line.split(), gpus=gpus)


@pytest.mark.parametrize("line", ["--executions eager,compile", "--candidate execution=compile"])
@pytest.mark.parametrize(
    ("variables", "found"),
    [({"CXX": "/nonexistent"}, "/nonexistent"), ({"PATH": "/nonexistent"}, "g++")],
)
def test_requested_compilation_needs_a_compiler(
    read: Read, line: str, variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = read(*line.split())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sentence = f"{NO_COMPILER} {found} is not a working compiler; install both, or leave"
    with pytest.raises(Refused, match=re.escape(sentence)):
        check_compiler(options)


@pytest.mark.parametrize("option", ["--spec", "--candidate"])
def test_unknown_compiler_option_is_refused(read: Read, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = SimpleNamespace(stdout="combo_kernels epilogue_fusion")
    monkeypatch.setattr("ddpperf.machine.compiler.run_child", lambda *_: listed)
    options = read("--executions", "compile", option, "inductor=combo_kernel", gpus=2)
    monkeypatch.setattr("ddpperf.plugin.options.slow_checks.compiler_reason", lambda _: "")
    sentence = (
        f"{option} inductor=combo_kernel: torch's compiler has no option combo_kernel; write combo_kernels"
    )
    with pytest.raises(Refused, match=sentence):
        check_compiler(options)


def test_default_compilation_without_a_compiler_is_skipped(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only requested executions are refused."""
    monkeypatch.setenv("CXX", "/nonexistent")
    cases = [
        possible(case, Machine(device="cuda")) if isinstance(case, TrainingSpec) else case
        for case in test_scaling.weak_scaling(read(gpus=2))
    ]
    skipped = [case for case in cases if not isinstance(case, Spec)]
    assert skipped
    assert {getattr(spec, "execution", None) for case in skipped for spec in case.values} == {"compile+graph"}
    assert all(NO_COMPILER in str(case.marks) for case in skipped)
    assert not [case for case in cases if isinstance(case, TrainingSpec) and case.compiled]
