"""Options of a run: the defaults of each machine, given values, training fields, and refusals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.machine.hardware import Links
from ddpperf.plugin.options import option_table
from ddpperf.plugin.options.ab_sides import changed
from ddpperf.plugin.options.options import GPU_INDUCTOR, Options, default_world_sizes, is_experiment
from ddpperf.plugin.options.refused_options import prepare
from ddpperf.specs import EpochSpec, TrainingSpec, from_json, to_json
from perf import test_scaling
from perf.test_batch_size import sweep
from tests.canned import CannedSuite
from tests.command_line import Read

NETWORK = "--node-link 5e-6,50"


def spec(*fields: str) -> list[str]:
    return [argument for field in fields for argument in ("--spec", field)]


def step(options: Options, world_size: int, **fields: Any) -> TrainingSpec:
    return options.step(world_size=world_size, per_rank_batch_size=8, **fields)


# --- values


def test_defaults_on_the_cpu(read: Read) -> None:
    options = read()
    assert (options.device, options.world_sizes) == ("cpu", (1, 2))
    assert (options.batch_sizes, sweep(options)) == ((32,), (32, 128, 512))
    assert (options.global_batch_sizes, options.executions, options.input) == ((64,), ("eager",), "fixed")
    assert (options.model, options.precision, options.data) == ("resnet18", "fp32", Data())
    assert (options.epoch_images, options.rounds, options.deadline) == (512, 10, 120.0)
    on_gpus = dataclasses.replace(read("--device", "cpu", gpus=4), given=frozenset())
    assert on_gpus == options, "whatever GPUs there are"


def test_defaults_on_gpus(read: Read) -> None:
    options = read(gpus=4)
    assert (options.device, options.world_sizes) == ("cuda", (1, 2, 4))
    assert (options.batch_sizes, sweep(options)) == ((32, 128, 512), (32, 128, 512, 2048))
    assert options.global_batch_sizes == (128, 512)
    assert (options.model, options.precision) == ("resnet18_cifar", "bf16")
    assert (options.epoch_images, options.input) == (50_000, "device"), "all of the data set"
    assert options.executions == ("graph", "compile+graph", "eager")


@pytest.mark.parametrize(
    ("on_node", "nodes", "expected"),
    [(2, 1, (1, 2)), (1, 1, (1,)), (6, 1, (1, 2, 4, 6)), (4, 3, (1, 2, 4, 8, 12)), (3, 2, (1, 2, 3, 6))],
)
def test_world_sizes_are_powers_of_two_and_whole_nodes(
    on_node: int, nodes: int, expected: tuple[int, ...]
) -> None:
    assert default_world_sizes(on_node, nodes) == expected


def test_given_values_replace_defaults(read: Read) -> None:
    line = (
        "--device cuda --world-sizes 2,1 --batch-sizes 64,16 --global-batch-sizes 32,8 --model"
        " resnet50_cifar --precision tf32 --epoch-images 2 --spec delay_seconds=10 --rounds 3"
        f" --project-to 16,2 --node-size 4 {NETWORK} --deadline 0.5 --benchmark-compare-fail=median:5%"
        " --benchmark-compare"
    )
    options = read(*line.split(), gpus=2)
    assert (options.world_sizes, options.batch_sizes, sweep(options)) == ((1, 2), (16, 64), (16, 64))
    assert options.global_batch_sizes == (8, 32)
    assert (options.model, options.precision) == ("resnet50_cifar", "tf32")
    assert (options.epoch_images, options.delay_seconds, options.rounds) == (2, 10.0, 3)
    assert (options.deadline, options.spec_fields) == (0.5, {})
    network = Network(latency=5e-6, bandwidth=50e9)
    assert options.links == Links(node=4, network=network, project_to=(2, 16))
    assert options.slower_ratio == pytest.approx(1.05)
    assert read("--candidate", "comm_hook=bf16").rounds == 7, "an A/B run has fewer"


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        *((option_table.NUMBER, text, int(text)) for text in ("1", "1000000000")),
        *((option_table.NUMBER, text, None) for text in ("", "0", "-1", "1.0", "²")),
        *((option_table.SECONDS, text, float(text)) for text in ("1e-9", "86400")),
        *((option_table.SECONDS, text, None) for text in ("", "0", "-1", "86401", "nan", "inf")),
        *((option_table.buffer_size, *row) for row in (("64KiB", 2**16), ("8GiB", 2**33), ("4", 4))),
        *((option_table.buffer_size, text, None) for text in ("1KB", "0B", "9GiB", "1026B")),
        (option_table.node_link, "5e-6,50", Network(latency=5e-6, bandwidth=50e9)),
        *((option_table.node_link, text, None) for text in ("50", "5e-6,0", "2,50")),
    ],
)
def test_values_have_limits(convert: Callable[[str], Any], text: str, value: Any) -> None:
    if value is not None:
        assert convert(text) == value
        return
    with pytest.raises(ValueError, match=r"^takes "):
        convert(text)


def test_experiments_lie_in_a_folder_called_perf() -> None:
    assert is_experiment("project/perf/test_it.py::test_a")
    assert not any(map(is_experiment, ("tests/test_it.py::test_a[perf/x]", "tests/perf.py")))


# --- trainings


def test_specs_have_the_fields_of_the_options(read: Read) -> None:
    fields: dict[str, Any] = {"model": "resnet50_cifar", "precision": "bf16", "epoch_images": 100}
    cpu = read("--model", "resnet50_cifar", "--precision", "bf16", "--epoch-images", "100")
    common: dict[str, Any] = {**fields, "per_rank_batch_size": 8, "data": "synthetic"}
    plain: dict[str, Any] = {**common, "memory_format": "contiguous"}
    assert step(cpu, 2) == TrainingSpec(world_size=2, strategy="ddp", **plain)
    assert step(cpu, 1) == TrainingSpec(world_size=1, strategy="single", **plain)
    cuda = read("--model", "resnet50_cifar", "--precision", "fp16", "--epoch-images", "100", gpus=2)
    epoch = cuda.epoch(
        world_size=2, per_rank_batch_size=8, strategy="data_parallel", precision="bf16", execution="eager"
    )
    expected = EpochSpec(world_size=2, strategy="data_parallel", memory_format="channels_last", **common)
    assert epoch == expected
    own = dataclasses.replace(read(gpus=2), model="mine:make").step(world_size=1, per_rank_batch_size=2)
    assert (own.model, own.memory_format) == ("mine:make", "contiguous")
    data = Data(name="imagefolder", path=Path("x.pt"), digest="0123456789ab", train_images=7)
    assert step(dataclasses.replace(cpu, data=data, requested_epoch_images=None), 1).digest == data.digest


def test_data_set_must_suit_model_and_epoch(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hundred = Data(name="imagefolder", path=Path("x.pt"), digest="ab", train_images=5000, classes=100)
    monkeypatch.setattr("ddpperf.data.cache.prepare", lambda *_: hundred)
    line = ("--data", "imagefolder:x", "--world-sizes", "2")
    assert prepare(read(*line, "--epoch-images", "5000"), tmp_path).data.classes == 100
    with pytest.raises(Refused, match="--model resnet18_cifar has 10 outputs, imagefolder has 100 classes;"):
        prepare(read(*line, "--model", "resnet18_cifar"), tmp_path)
    for count in ("1", "5001"):
        with pytest.raises(Refused, match=f"--epoch-images takes 2 to 5000 images: .*, got {count};"):
            prepare(read(*line, "--epoch-images", count), tmp_path)


def test_vit_needs_images_of_its_size(read: Read) -> None:
    options = read(gpus=4)
    larger = dataclasses.replace(options, data=dataclasses.replace(options.data, image_size=(64, 64)))
    marks = [str(case.marks) for case in test_scaling.weak_scaling(larger) if isinstance(case, ParameterSet)]
    assert sum("vit_b_16 takes images of 32x32" in mark for mark in marks) == len(options.world_sizes)


def test_first_execution_is_every_steps(read: Read) -> None:
    options = read("--executions", "graph, compile+graph", gpus=2)
    assert options.fastest_execution == "compile+graph"
    assert [step(options, size).execution for size in (1, 2)] == ["graph"] * 2
    assert step(options, 2, execution="eager").execution == "eager", "unless a case has its own"


@pytest.mark.parametrize("inductor", ["", "epilogue_fusion"])
def test_compiler_options_are_set_in_compiled_executions(read: Read, inductor: str) -> None:
    options = read(*(spec(f"inductor={inductor}") if inductor else []), gpus=2)
    found = {name: step(options, 2, execution=name).inductor for name in ("eager", "graph", "compile")}
    assert found == {"eager": "", "graph": "", "compile": inductor}
    assert step(options, 2, execution="compile+graph").inductor == (inductor or GPU_INDUCTOR)


def test_fields_reach_the_trainings_that_have_them(read: Read) -> None:
    fields = "comm_hook=bf16", "bucket_cap_mb=4", "static_graph=true", "buffer_sync=False"
    plain, options = read(), read(*spec(*fields))
    values: dict[str, Any] = {"comm_hook": "bf16", "bucket_cap_mb": 4}
    values |= {"static_graph": True, "buffer_sync": False}
    assert step(options, 2) == step(plain, 2, **values)
    assert step(options, 2, strategy="zero1") == step(plain, 2, strategy="zero1", **values)
    assert step(options, 2, comm_hook="fp16") == step(options, 2), "--spec overrides what a case says"
    for strategy in ("fsdp", "data_parallel"):
        assert step(options, 2, strategy=strategy) == step(plain, 2, strategy=strategy)
    assert step(options, 1) == step(plain, 1), "one device has no hook"
    own = read(*spec("strategy=own_ddp", "comm_hook=symmetric_memory", "bucket_cap_mb=25"), gpus=2)
    ours = step(own, 2)
    assert (ours.strategy, ours.comm_hook, ours.bucket_cap_mb) == ("own_ddp", "symmetric_memory", 25)
    assert from_json(to_json(ours)) == ours, "25 was a default once, but not of this"
    assert [step(read(*spec("accumulation_steps=2")), size).accumulation_steps for size in (1, 2)] == [2, 2]
    assert [step(read(*spec("strategy=fsdp")), size).strategy for size in (1, 2)] == ["single", "fsdp"]
    synchronized = read(*spec("sync_batch_norm=TRUE"), gpus=2)
    assert [step(synchronized, size).sync_batch_norm for size in (1, 2)] == [False, True]
    assert not step(synchronized, 2, strategy="data_parallel", execution="eager").sync_batch_norm
    sharded = step(synchronized, 2, strategy="fsdp", execution="eager")
    assert (sharded.sync_batch_norm, sharded.memory_format) == (True, "contiguous")


def test_changing_to_own_ddp_keeps_shared_options() -> None:
    ddp = TrainingSpec(
        world_size=2, per_rank_batch_size=8, strategy="ddp", gradient_as_bucket_view=True, bucket_cap_mb=8
    )
    own: dict[str, Any] = {"strategy": "own_ddp", "gradient_as_bucket_view": False}
    by_avg, mapped = (replace(ddp, comm_hook=hook) for hook in ("avg", "symmetric_memory"))
    assert changed(by_avg, {"strategy": "own_ddp"}) == replace(ddp, **own)
    assert changed(mapped, {"strategy": "own_ddp"}) == replace(mapped, **own)
    back = changed(replace(mapped, **own), {"strategy": "ddp"})
    assert back == replace(mapped, gradient_as_bucket_view=False)
    sharded = changed(replace(ddp, memory_format="channels_last"), {"strategy": "zero1"})
    assert sharded == replace(ddp, strategy="zero1"), "its flat buffers have no memory format"


# --- refusals

NODES = "--nodes 2 --interface lo --launcher srun"
REFUSALS = {
    "--device cuda": "world_size=1 needs 1 GPU, found 0; pass --device cpu",
    "--world-sizes 2,2": "--world-sizes takes each value once, got '2,2'",
    "--world-sizes 4096": "--world-sizes takes whole numbers from 1 to 1024, got '4096'",
    "--precision fp8": "precision must be one of fp32, tf32, bf16, fp16, got 'fp8'; pass another value",
    "--device tpu": "--device takes auto, cuda, cpu, got 'tpu'",
    "--precision tf32": "--precision tf32 needs a GPU, this runs on the CPU; pass fp32 or bf16",
    "--model mine:make --data cifar10": "makes its own batches, got --data, too; leave one out",
    "--project-to 16": "--project-to 16 is more than one node of 2 devices; pass --node-link",
    f"--project-to 5 {NETWORK}": "does not fill whole nodes of 2 devices; pass a multiple of 2",
    "--replicates 1 --candidate comm_hook=bf16": "cannot tell a difference from chance in an A/B run",
    "--node-size 1": "--node-size 1 is less than the 2 devices of this run; pass 2 or more",
    f"{NODES} --world-sizes 3": "does not fit 2 nodes of 2 ranks; pass at most 2, or a multiple of 2 up to 4",
    "--interface lo": "--interface is only for runs on several nodes; pass --nodes 2, or remove it",
    "--nodes 2": "--nodes 2 needs --launcher; pass srun, mpirun or a command (docs/nodes.md)",
    "--launcher={rnak}": "--launcher takes a command with none but {nodes}, ",
    "--rounds " + "9" * 5000: "--rounds takes whole numbers from 1 to 1000000000, got '99999",
    "--benchmark-compare .": "pytest read '.' as the stored run of --benchmark-compare; put it last",
    "--benchmark-compare perf/test_a.py::test_a": "pytest read 'perf/test_a.py::test_a' as the stored run of",
    "--benchmark-compare-fail=median:5%": "needs a baseline to compare with; add --benchmark-compare",
    "--benchmark-compare-fail=median:5% --benchmark-compare-fail=median:90% --benchmark-compare": (
        "--benchmark-compare-fail takes one median:N%, got another or several"
    ),
    "--benchmark-compare-fail=min:5% --benchmark-compare": "-fail takes one median:N%, got another",
    "--candidate comm_hook=bf16 --benchmark-compare": (
        "--benchmark-compare measures this environment as the candidate, got --candidate, too; leave one out"
    ),
    "--executions eager,compile+graph": "this runs on the CPU; pass other --executions or another --spec",
    "--spec worldsize=2": "--spec takes the fields strategy, comm_hook, ",
    "--candidate LD_PRELOAD=/no/libnccl.so.2": "takes existing libraries in LD_PRELOAD; check the path",
    "--candidate delay_seconds=99": "delay_seconds must be a number from 0 to 10, got 99",
    "--spec strategy=data_parallel": "--spec takes ddp, zero1, own_ddp, fsdp, got",
    "--world-sizes 1 --spec strategy=fsdp": "--spec strategy=fsdp changes no training of this run; leave",
    "--spec strategy=fsdp --spec comm_hook=bf16": "--spec comm_hook=bf16 changes no training of this run;",
    "--spec inductor=combo_kernels": "--spec inductor=combo_kernels changes no training of this run;",
    "--candidate execution=graph": "this runs on the CPU; pass other --executions or another --candidate",
    "--world-sizes 1 --candidate static_graph=true": "static_graph=True changes no training of this run;",
}


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: line[:50])
def test_wrong_option_is_refused_with_one_sentence(read: Read, line: str) -> None:
    with pytest.raises((pytest.UsageError, Refused), match=re.escape(REFUSALS[line])):
        read(*line.split())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--rounds 0", "ERROR: --rounds takes whole numbers from 1 to 1000000000, got '0'"),
        ("--verdict perf", "ERROR: --verdict takes a file in a writable folder, got 'perf'; name another"),
        ("--verdict a.md --benchmark-json a.md --report b.html", "ERROR: two options name a.md, but"),
        ("--benchmark-json a.json --benchmark-compare=./a.json", "ERROR: two options name a.json, but"),
        ("--verdict pytest.ini", "ERROR: --verdict replaces earlier verdicts only, got 'pytest.ini'; name"),
    ],
)
def test_refused_run_ends_with_status_4(canned_suite: CannedSuite, line: str, sentence: str) -> None:
    canned_suite.run("perf", *line.split()).assert_one_sentence(4, sentence)
    assert canned_suite.saved_runs() == []
