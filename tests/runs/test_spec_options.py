"""--executions and --spec: what they say reaches every training's spec that has it, and each mistake is one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, parameters, possible
from ddpperf.plugin.options.options import GPU_INDUCTOR, Options
from ddpperf.plugin.options.parser import read_options
from ddpperf.plugin.options.spec_fields import changed
from ddpperf.specs import Spec, TrainingSpec, from_json, to_json
from perf import test_batch_size, test_precision, test_scaling, test_strategies
from perf import test_execution as test_forms
from tests.project import Project

pytest_plugins = ["pytester"]  # for the one Config that it parses; runs have a project of their own

Read = Callable[..., Options]
EXPERIMENTS: tuple[Callable[[Options], Iterator[Case]], ...] = (
    test_batch_size.epochs,
    test_batch_size.one_epoch_with_most_workers,
    test_forms.executions,
    test_precision.precisions,
    test_scaling.weak_scaling,
    test_scaling.strong_scaling,
    test_scaling.epochs,
    test_strategies.variants,
)


@pytest.fixture
def read(pytester: pytest.Pytester) -> Read:
    """The options that a command line gives on a machine with so many GPUs."""
    return lambda *arguments, gpus=0: read_options(
        pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus
    )


def spec(*fields: str) -> list[str]:
    return [argument for field in fields for argument in ("--spec", field)]


def step(options: Options, world_size: int, **fields: Any) -> TrainingSpec:
    return options.step(world_size=world_size, per_rank_batch_size=8, **fields)


# --- forms


def test_the_cpu_is_eager_by_default_and_gpus_replay_graphs(read: Read) -> None:
    assert (read().executions, read().fastest_form, read().input) == (("eager",), "eager", "fixed")
    options = read(gpus=2)
    assert (options.executions, options.fastest_form) == (
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
def test_the_first_form_is_every_steps(
    read: Read, given: str, executions: tuple[str, ...], fastest: str
) -> None:
    options = read("--executions", given, gpus=2)
    assert (options.executions, options.fastest_form) == (executions, fastest)
    assert [step(options, size).execution for size in (1, 2)] == [executions[0]] * 2
    assert step(options, 2, execution="eager").execution == "eager", "unless a cell has its own"


def test_what_the_gpus_compile_with_is_theirs_alone(read: Read) -> None:
    options = read(gpus=2)
    inductors = {
        execution: step(options, 2, execution=execution).inductor
        for execution in ("eager", "graph", "compile", "compile+graph")
    }
    assert inductors == {"eager": "", "graph": "", "compile": "", "compile+graph": GPU_INDUCTOR}
    assert step(read("--executions", "compile"), 2).inductor == ""


# --- fields of the spec


def test_what_is_set_reaches_the_cells_that_have_it(read: Read) -> None:
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
    assert step(options, 2, comm_hook="fp16") == step(options, 2), "it outdoes what a cell says"
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


def test_the_other_sides_own_ddp_keeps_the_options_that_it_has() -> None:
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


def test_own_ddp_has_two_of_ddps_options(read: Read) -> None:
    options = read(*spec("strategy=own_ddp", "comm_hook=symmetric_memory", "bucket_cap_mb=25"), gpus=2)
    ours = step(options, 2)
    assert (ours.strategy, ours.comm_hook, ours.bucket_cap_mb) == ("own_ddp", "symmetric_memory", 25)
    assert from_json(to_json(ours)) == ours, "25 was a default once, but not of this"


def test_parts_of_a_batch_are_set_on_one_device_too(read: Read) -> None:
    options = read(*spec("accumulation_steps=2"))
    assert [step(options, size).accumulation_steps for size in (1, 2)] == [2, 2]


def test_a_strategy_is_that_of_all_cells_that_name_none(read: Read) -> None:
    options = read(*spec("strategy=fsdp"))
    assert [step(options, size).strategy for size in (1, 2)] == ["single", "fsdp"]
    assert step(options, 2, strategy="ddp").strategy == "ddp"


def test_normalizing_over_all_ranks_is_set_where_there_are_some(read: Read) -> None:
    options = read(*spec("sync_batch_norm=TRUE"), gpus=2)
    assert [step(options, size).sync_batch_norm for size in (1, 2)] == [False, True]
    assert not step(options, 2, strategy="data_parallel", execution="eager").sync_batch_norm
    sharded = step(options, 2, strategy="fsdp", execution="eager")
    assert (sharded.sync_batch_norm, sharded.memory_format) == (True, "contiguous")


@pytest.mark.parametrize("inductor", ["epilogue_fusion", "max_autotune+triton.cooperative_reductions", ""])
def test_the_compilers_options_are_set_in_compiled_forms(read: Read, inductor: str) -> None:
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
def test_every_experiment_has_cells_and_each_an_id_of_its_own(
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
def test_a_batch_that_nobody_asked_for_is_skipped(
    read: Read, batch_size: str, gpus: int, experiment: Callable[[Options], Iterator[Any]], own: int
) -> None:
    (case,) = experiment(read("--batch-sizes", batch_size, *spec("accumulation_steps=3"), gpus=gpus))
    assert f"accumulation_steps=3 does not divide a batch of {own} images" in case.marks[0].kwargs["reason"]


# --- mistakes

NO_COMPILER = "torch.compile needs a C++ compiler with Python's headers, and"
FIELD = (
    "--spec takes FIELD=VALUE with a field of comm_hook, bucket_cap_mb, gradient_as_bucket_view, static_graph, buffer_sync, "
    "strategy, sync_batch_norm, accumulation_steps, inductor, got"
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--executions", "fast"],
            "--executions takes eager, compile, graph, compile+graph, got 'fast'; pass for example --executions eager",
        ),
        (["--executions", "eager,"], "--executions takes eager, compile, graph, compile+graph, got ''; pass"),
        (
            ["--executions", "eager, eager"],
            "--executions names a form twice, got 'eager, eager'; name each once",
        ),
        (
            ["--executions", "graph"],
            "execution graph is captured by a GPU's driver; this runs on the CPU; pass other --executions",
        ),
        (
            ["--executions", "eager,compile+graph"],
            "execution compile+graph is captured by a GPU's driver; this runs on the CPU; pass",
        ),
        (spec("comm_hook"), f"{FIELD} 'comm_hook'; pass for example --spec comm_hook=bf16"),
        (spec("model=resnet18"), f"{FIELD} 'model=resnet18'; pass"),
        (spec("=2"), f"{FIELD} '=2'; pass"),
        (
            spec("bucket_cap_mb=1", "bucket_cap_mb=2"),
            "--spec sets bucket_cap_mb twice, got 1 and 2; set it once",
        ),
        (
            spec("bucket_cap_mb=big"),
            "--spec bucket_cap_mb takes a whole number, got 'big'; pass for example --spec bucket",
        ),
        (spec("bucket_cap_mb=-1"), "--spec bucket_cap_mb takes a whole number, got '-1'; pass"),
        (spec("accumulation_steps=²"), "--spec accumulation_steps takes a whole number, got '²'; pass"),
        (
            spec(f"accumulation_steps={10**9}"),
            "--spec accumulation_steps takes a whole number, got '1000000000'; pass",
        ),
        (spec("accumulation_steps=0"), "accumulation_steps must be a whole number of at least 1, got 0"),
        (spec("static_graph=yes"), "--spec static_graph takes true or false, got 'yes'; pass one of them"),
        (
            spec("comm_hook=int8"),
            "comm_hook must be one of none, avg, bf16, fp16, powersgd, symmetric_memory, got 'int8'",
        ),
        (
            spec("comm_hook=avg"),
            "comm_hook avg needs NCCL; this runs on the CPU; pass other --executions or another --spec",
        ),
        (
            spec("sync_batch_norm=true"),
            "sync_batch_norm is there for GPUs alone; this runs on the CPU; pass other",
        ),
        (
            ["--world-sizes", "1", *spec("strategy=fsdp")],
            "--spec strategy=fsdp needs several ranks, got one; pass --world",
        ),
        (
            ["--world-sizes", "1", *spec("comm_hook=bf16")],
            "--spec comm_hook=bf16 needs several ranks, got one; pass --world",
        ),
        (
            spec("strategy=data_parallel"),
            "--spec strategy takes ddp, zero1, own_ddp, fsdp, got data_parallel; pass one of",
        ),
        (
            spec("strategy=fsdp", "comm_hook=bf16"),
            "comm_hook=bf16 is an option of DDP, got strategy fsdp; use ddp or zero1",
        ),
        (
            ["--batch-sizes", "8", *spec("accumulation_steps=3")],
            "accumulation_steps=3 does not divide a batch of 8 images; use a divisor",
        ),
        (
            spec("static_graph=true", "accumulation_steps=2"),
            "static_graph does not know no_sync, got accumulation_steps above",
        ),
        (
            spec("inductor=combo_kernels"),
            "--spec inductor=combo_kernels needs a compiled form, got eager; pass --executions",
        ),
        (
            ["--executions", "compile", *spec("inductor=a b")],
            "inductor must be names of torch's inductor options joined by +, got",
        ),
        (
            ["--executions", "compile", *spec("strategy=fsdp")],
            "execution compile cannot compile strategy fsdp; use eager",
        ),
    ],
    ids=lambda value: "_".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_status_4(
    project: Project, arguments: list[str], sentence: str
) -> None:
    run = project.run("perf", "--world-sizes", "1,2", *arguments)
    run.assert_one_sentence(4, f"ERROR: {sentence}")
    assert project.saved_runs() == []


@pytest.mark.parametrize(
    ("environment", "found"),
    [({"CXX": "/nonexistent"}, "/nonexistent"), ({"PATH": "/nonexistent"}, "g++")],
)
def test_without_a_compiler_a_compiled_form_is_one_sentence(
    project: Project, environment: dict[str, str], found: str
) -> None:
    project.environment |= environment
    run = project.run("perf", "--executions", "eager,compile")
    run.assert_one_sentence(
        4, f"ERROR: {NO_COMPILER} {found} is none; install both, or leave compiled forms out"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            spec("comm_hook=powersgd"),
            "execution graph cannot capture powersgd, which waits for the device where it compresses;",
        ),
        (
            spec("strategy=fsdp"),
            "execution graph cannot capture fsdp, whose parameters come and go in every step;",
        ),
        (
            ["--executions", "eager", "--precision", "fp16", *spec("strategy=fsdp")],
            "fp16's gradient scaler looks at a rank's own",
        ),
        (
            ["--executions", "compile", *spec("inductor=combo_kernel")],
            "--spec inductor=combo_kernel: torch's compiler has no option combo_kernel; write combo_kernels or",
        ),
        (
            ["--executions", "eager,graph", *spec("inductor=a")],
            "--spec inductor=a needs a compiled form, got eager, graph;",
        ),
    ],
)
def test_mistakes_on_gpus_are_sentences_too(read: Read, arguments: list[str], sentence: str) -> None:
    with pytest.raises((pytest.UsageError, Refused), match=f"^{re.escape(sentence)}"):
        read(*arguments, gpus=2)


def test_by_default_gpus_without_a_compiler_leave_compiled_forms_out(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for them: their cells are skipped with the reason, and the others are measured."""
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
