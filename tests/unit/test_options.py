"""Options of a run: the defaults of each machine, given values, and refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.machine.hardware import Links
from ddpperf.plugin.options.options import is_experiment
from ddpperf.plugin.options.slow_checks import prepare, prepare_images
from ddpperf.specs import EpochSpec, Spec, TrainingSpec
from perf.test_batch_size import sweep
from perf.test_scaling import HEAVY, weak_scaling
from tests.canned import CannedSuite
from tests.command_line import Read, reader

NETWORK = "--node-link 5e-6,50"

THRESHOLD = '[[threshold]]\nhardware = "h200x4"\ntest = "test_weak_scaling"\nspeedup = 3.6\n'


@pytest.fixture
def read(pytestconfig: pytest.Config) -> Read:
    return reader(pytestconfig)


def test_defaults_on_the_cpu(read: Read) -> None:
    options = read()
    assert (options.device, options.world_sizes) == ("cpu", (1, 2))
    assert (options.batch_sizes, sweep(options)) == ((32,), (32, 128, 512))
    assert options.global_batch_sizes == (64,)
    assert (options.model, options.precision) == ("resnet18", "fp32")
    assert options.data == Data(name="synthetic", path=None, digest="", train_images=50_000, test_images=1024)
    assert (options.epoch_images, options.delay_seconds, options.rounds) == (512, 0.0, 10)
    assert (options.deadline_seconds, options.worker_logs, options.slower_ratio) == (120.0, None, None)
    on_gpus = dataclasses.replace(read("--device", "cpu", gpus=4), given=frozenset())
    assert on_gpus == read(), "whatever GPUs there are"


def test_defaults_on_gpus(read: Read) -> None:
    options = read(gpus=4)
    assert (options.device, options.world_sizes) == ("cuda", (1, 2, 4))
    assert (options.batch_sizes, sweep(options)) == ((32, 128, 512), (32, 128, 512, 2048))
    assert options.global_batch_sizes == (128, 512)
    assert (options.model, options.precision) == ("resnet18_cifar", "bf16")
    assert options.epoch_images == 50_000, "all of the data set"


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
    assert options.deadline_seconds == 0.5
    network = Network(latency=5e-6, bandwidth=50e9)
    assert options.links == Links(node=4, network=network, project_to=(2, 16))
    assert options.slower_ratio == pytest.approx(1.05)
    assert read("--precision", "bf16", "--epoch-images", "50000").precision == "bf16", "the CPU has bf16"


def test_ab_runs_have_fewer_rounds(read: Read) -> None:
    assert read("--candidate", "comm_hook=bf16").rounds == 7
    assert read("--candidate", "comm_hook=bf16", "--rounds", "3").rounds == 3


def test_output_folders_are_made_when_the_run_begins(read: Read, tmp_path: Path) -> None:
    options = read("--worker-logs", str(tmp_path / "a" / "b"))
    assert options.worker_logs == tmp_path / "a" / "b"
    assert not options.worker_logs.exists()
    prepare(options, tmp_path)
    prepare(options, tmp_path)
    assert options.worker_logs.is_dir()


def test_specs_have_the_fields_of_the_options(read: Read) -> None:
    cpu = read("--model", "resnet50_cifar", "--precision", "bf16", "--epoch-images", "100")
    step = cpu.step(world_size=2, per_rank_batch_size=8)
    fields: Any = {
        "model": "resnet50_cifar",
        "precision": "bf16",
        "epoch_images": 100,
        "per_rank_batch_size": 8,
    }
    assert step == TrainingSpec(
        world_size=2, strategy="ddp", memory_format="contiguous", data="synthetic", **fields
    )
    alone = TrainingSpec(world_size=1, strategy="single", memory_format="contiguous", **fields)
    assert cpu.step(world_size=1, per_rank_batch_size=8) == alone
    cuda = read("--model", "resnet50_cifar", "--precision", "fp16", "--epoch-images", "100", gpus=2)
    epoch = cuda.epoch(
        world_size=2, per_rank_batch_size=8, strategy="data_parallel", precision="bf16", execution="eager"
    )
    assert epoch == EpochSpec(world_size=2, strategy="data_parallel", memory_format="channels_last", **fields)


@pytest.mark.parametrize(
    "name", ["vgg16", "", "torchvision:", "a b:c", "own:make:twice", "1:2", ":make", "os.path"]
)
def test_impossible_model_name_is_refused(read: Read, name: str) -> None:
    known = "--model: takes a built-in model, torchvision:NAME or package.module:function"
    with pytest.raises(
        Refused,
        match=f"{known}, got {re.escape(repr(name))}; pass for example resnet18",
    ):
        read("--model", name)


def test_too_many_classes_for_a_model_are_refused(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hundred = Data(name="imagefolder", path=Path("x.pt"), digest="ab", train_images=5000, classes=100)
    monkeypatch.setattr("ddpperf.data.cache.prepare", lambda *_: hundred)
    options = read("--model", "resnet18", "--data", "imagefolder:x")
    assert prepare_images(options, tmp_path).data.classes == 100
    with pytest.raises(
        Refused, match="--model resnet18_cifar has 10 outputs, imagefolder has 100 classes; pass"
    ):
        prepare_images(read("--model", "resnet18_cifar", "--data", "imagefolder:x"), tmp_path)


def test_vit_is_measured_with_images_of_its_size(read: Read) -> None:
    options = read(gpus=4)
    heavy = [case for case in weak_scaling(options) if isinstance(case, TrainingSpec) and case.model == HEAVY]
    assert [case.world_size for case in heavy] == [1, 2, 4]
    larger = dataclasses.replace(options, images=dataclasses.replace(options.data, image_size=(64, 64)))
    skipped = [
        case for case in weak_scaling(larger) if not isinstance(case, Spec) and HEAVY in str(case.marks)
    ]
    assert [case.values for case in skipped] == [(case,) for case in heavy]
    assert "takes images of 32x32" in str(skipped[0].marks)


def test_specs_name_the_digest_of_the_images(tmp_path: Path, read: Read) -> None:
    options = read()
    data = Data(name="imagefolder", path=tmp_path / "x.pt", digest="0123456789ab", train_images=7)
    spec = dataclasses.replace(options, images=data).step(world_size=1, per_rank_batch_size=2)
    assert (spec.data, spec.digest) == ("imagefolder", "0123456789ab")


def test_custom_model_keeps_its_memory_format(read: Read) -> None:
    spec = dataclasses.replace(read(gpus=2), model="mine:make").step(world_size=1, per_rank_batch_size=2)
    assert (spec.model, spec.memory_format) == ("mine:make", "contiguous")


@pytest.mark.parametrize(
    ("test", "experiment"),
    [
        ("perf/test_it.py::test_a", True),
        ("project/perf/test_it.py::test_a[perf]", True),
        ("tests/test_it.py::test_a[perf/x]", False),
        ("tests/perf.py", False),
    ],
)
def test_experiments_lie_in_a_folder_called_perf(test: str, experiment: bool) -> None:
    assert is_experiment(test) is experiment


# --- refusals

LINK = "takes seconds up to 1 and GB/s up to 100000, joined by a comma"
NUMBER = "takes a whole number from 1 to 999999999, got"
REFUSALS = {
    "--device cuda": "world_size=1 needs 1 GPU, found 0; pass --device cpu",
    "--device tpu": "--device: takes auto, cuda or cpu, got 'tpu'; pass for example auto",
    "--world-sizes 0": "--world-sizes: takes a whole number from 1 to 1024, got '0'; pass for example 2",
    "--world-sizes 2,2": (
        "--world-sizes: takes whole numbers from 1 to 1024, joined by commas, got '2,2', which names"
    ),
    "--world-sizes 4096": (
        "--world-sizes: takes a whole number from 1 to 1024, got '4096'; pass for example 2"
    ),
    "--batch-sizes 32,": f"--batch-sizes: {NUMBER} ''; pass for example 2",
    "--global-batch-sizes none": f"--global-batch-sizes: {NUMBER} 'none'; pass for example 2",
    "--world-sizes 1,2,3 --global-batch-sizes 12,64": (
        "--global-batch-sizes 64 does not divide over 3 ranks; pass a multiple of 3, or other --world-sizes"
    ),
    "--precision fp8": "--precision: takes fp32, tf32, bf16 or fp16, got 'fp8'; pass for example fp32",
    "--precision fp16": "--precision fp16 needs a GPU, this runs on the CPU; pass fp32 or bf16",
    "--precision tf32": "--precision tf32 needs a GPU, this runs on the CPU; pass fp32 or bf16",
    "--model mine:make --data cifar10": (
        "--model mine:make makes its own batches, got --data, too; leave one out"
    ),
    "--epoch-images 0": f"--epoch-images: {NUMBER} '0'; pass for example 2",
    "--epoch-images 50001": (
        "--epoch-images takes 2 to 50000 images: one per rank or more, synthetic has no more, "
        "got 50001; pass another number"
    ),
    "--epoch-images 1": (
        "--epoch-images takes 2 to 50000 images: one per rank or more, synthetic has no more, got 1"
    ),
    **{
        f"--node-link={link}": f"--node-link: {LINK}, got {link!r}; pass for example 5e-6,50"
        for link in ("", "50", "5e-6,0", "0,50", "-1,50", "2,50", "5e-6,nan", "5e-6,50,1", "5us,50")
    },
    "--buffer-sizes 1KB": "--buffer-sizes: takes a size from 4B to 8GiB, got '1KB'; pass for example 64KiB",
    "--buffer-sizes 0": "--buffer-sizes: takes a size from 4B to 8GiB, got '0'",
    "--buffer-sizes 1KiB,9GiB": "--buffer-sizes: takes a size from 4B to 8GiB, got '9GiB'",
    "--buffer-sizes 1KiB,1026B": (
        "--buffer-sizes: takes a size from 4B to 8GiB, got '1026B', which is no multiple of 4 "
        "bytes, the size of a float32"
    ),
    "--buffer-sizes 1KiB,1024": (
        "--buffer-sizes: takes sizes from 4B to 8GiB, joined by commas, got '1KiB,1024', which "
        "names a value twice"
    ),
    "--project-to 16": ("--project-to 16 is more than one node of 2 devices; pass --node-link"),
    "--project-to 1,4": "--project-to 1 is a single device, which needs no prediction; pass 2 or more",
    "--project-to 2048": "--project-to: takes a whole number from 1 to 1024, got '2048'",
    f"--project-to 5 {NETWORK}": "--project-to 5 fills no whole nodes of 2 devices; pass a multiple of 2",
    "--replicates 1 --candidate comm_hook=bf16": (
        "--replicates 1 cannot tell a difference from chance in an A/B run"
    ),
    "--replicates 65": "--replicates: takes a whole number from 1 to 64, got '65'; pass for example 2",
    "--node-size 1": "--node-size 1 is less than the 2 devices of this run; pass 2 or more",
    "--world-sizes 3 --nodes 2 --interface lo --launcher srun": (
        "--world-sizes 3 does not fit 2 nodes of 2 ranks; pass at most 2, or a multiple of 2 up to 4, or"
    ),
    "--nodes 2 --interface lo --launcher srun --project-to 5": (
        "--project-to 5 fills no whole nodes of 2 devices;"
    ),
    "--interface lo": "--interface is only for runs on several nodes; pass --nodes 2, or remove it",
    "--nodes 2": "--nodes 2 needs --launcher; pass srun, mpirun or a command (docs/nodes.md)",
    "--launcher={rnak}": "--launcher: must be a command with none but {nodes}, ",
    "--node-size 0": f"--node-size: {NUMBER} '0'; pass for example 2",
    **{
        f"--spec delay_seconds={delay}": (
            f"--spec: delay_seconds takes seconds above 0 and up to 10, got '{delay}'; pass for example 0.5"
        )
        for delay in ("0", "nan", "99")
    },
    "--rounds " + "9" * 5000: (
        f"--rounds: {NUMBER} '9999999999999999999999...99999999999999999999999'; pass for example 2"
    ),
    "--deadline never": (
        "--deadline: takes seconds above 0 and up to 86400, got 'never'; pass for example 300"
    ),
    "--worker-logs=": (
        "--worker-logs: takes a folder, which is made if it does not exist, got ''; pass for example kept"
    ),
    "--benchmark-compare=": "--benchmark-compare takes the word after it, got '', no run; put it last",
    "--benchmark-compare .": "--benchmark-compare takes the word after it, got '.', no run; put it last",
    "--benchmark-storage elsewhere": (
        "--benchmark-storage is not used: runs are kept in .ddpperf/runs; leave it out"
    ),
    "--benchmark-compare-fail=median:5%": (
        "--benchmark-compare-fail needs a baseline to compare with; add --benchmark-"
    ),
    "--benchmark-compare-fail=median:5% --benchmark-compare-fail=median:90% --benchmark-compare": (
        "--benchmark-compare-fail takes one median:N%, got another or several"
    ),
    "--benchmark-compare-fail=min:5% --benchmark-compare": (
        "--benchmark-compare-fail takes one median:N%, got another"
    ),
    "--candidate comm_hook=bf16 --benchmark-compare": (
        "--benchmark-compare takes this environment as candidate, got --candidate, too; leave one out"
    ),
}


def test_measured_nodes_need_no_network_figures(read: Read) -> None:
    line = "--nodes 2 --interface lo --launcher srun --node-size 2 --project-to 16"
    assert read(*line.split()).links.project_to == (16,)
    with pytest.raises(Refused, match="--project-to 16 is more than one node of 2 devices; pass --node-link"):
        read(*line.split(), "--world-sizes", "1,2")


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: line[:50])
def test_wrong_option_is_refused_with_one_sentence(read: Read, line: str) -> None:
    with pytest.raises((pytest.UsageError, Refused), match=re.escape(REFUSALS[line])):
        read(*line.split())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--rounds 0", f"argument --rounds: {NUMBER} '0'; pass for example 2"),
        ("--precision fp16", "ERROR: --precision fp16 needs a GPU, this runs on the CPU; pass fp32 or bf16"),
        ("--worker-logs pytest.ini", "pytest.ini (File exists); name another folder"),
        (
            "--data nonsense",
            "ERROR: --data must be synthetic, cifar10[:DIR] or imagefolder:DIR, got 'nonsense'",
        ),
        ("-p no:benchmark", "ERROR: ddpperf needs pytest-benchmark, which was not loaded; leave"),
        (
            "--verdict perf",
            "ERROR: --verdict takes a file in a writable folder, got 'perf'; name another",
        ),
        (
            "--verdict pytest.ini",
            "ERROR: --verdict replaces earlier verdicts only, got 'pytest.ini'; name another file",
        ),
    ],
)
def test_refused_run_ends_with_status_4(canned_suite: CannedSuite, line: str, sentence: str) -> None:
    canned_suite.run("perf", *line.split()).assert_one_sentence(4, sentence)
    assert canned_suite.saved_runs() == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[[threshold", "perf/thresholds.toml is not valid TOML"),
        (
            THRESHOLD.encode() + b"speed = 1\n",
            "threshold 1 of perf/thresholds.toml has the unknown key 'speed'; write speedup",
        ),
    ],
)
def test_broken_threshold_file_is_refused(canned_suite: CannedSuite, content: bytes, sentence: str) -> None:
    (canned_suite.root / "perf" / "thresholds.toml").write_bytes(content)
    canned_suite.run().assert_one_sentence(4, f"ERROR: {sentence}")
    assert canned_suite.saved_runs() == []
