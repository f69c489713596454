"""Options: the defaults of each machine, what is made of them, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import Data
from ddpperf.machine.links import Links
from ddpperf.plugin.options.options import Options, is_experiment
from ddpperf.plugin.options.parser import read_options
from ddpperf.specs import EpochSpec, Spec, TrainingSpec
from perf.test_scaling import HEAVY, weak_scaling
from tests.project import Project

BETWEEN = ("--node-latency", "5e-6", "--node-bandwidth", "50")

pytest_plugins = ["pytester"]  # for the one Config that it parses; runs have a project of their own

THRESHOLD = '[[threshold]]\nhardware = "h200x4"\ntest = "test_weak_scaling"\nspeedup = 3.6\n'


@pytest.fixture
def read(pytester: pytest.Pytester) -> Callable[..., Options]:
    """The options that a command line gives on a machine with so many GPUs."""
    return lambda *arguments, gpus=0: read_options(
        pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus
    )


def test_defaults_on_the_cpu(read: Callable[..., Options]) -> None:
    options = read()
    assert (options.device, options.world_sizes) == ("cpu", (1, 2))
    assert (options.batch_sizes, options.batch_sweep) == ((32,), (32, 128, 512))
    assert options.global_batch_sizes == (64,)
    assert (options.model, options.precision) == ("resnet18", "fp32")
    assert options.data == Data(name="synthetic", path=None, digest="", train_images=50_000, test_images=1024)
    assert (options.epoch_images, options.delay_seconds) == (1024, 0.0)
    assert (options.rounds, options.deadline_seconds, options.worker_logs, options.slower_ratio) == (
        10,
        120.0,
        None,
        None,
    )
    assert read("--device", "cpu", gpus=4) == read(), "whatever GPUs there are"


def test_defaults_on_gpus(read: Callable[..., Options]) -> None:
    options = read(gpus=4)
    assert (options.device, options.world_sizes) == ("cuda", (1, 2, 4))
    assert (options.batch_sizes, options.batch_sweep) == ((32, 128, 512), (32, 128, 512, 2048))
    assert options.global_batch_sizes == (128, 512)
    assert (options.model, options.precision) == ("resnet18_cifar", "bf16")
    assert options.epoch_images == 50_000, "all of the data set"


def test_what_is_given_is_taken(read: Callable[..., Options]) -> None:
    options = read(
        *(
            "--device",
            "cuda",
            "--world-sizes",
            "2,1",
            "--batch-sizes",
            "64, 16",
            "--global-batch-sizes",
            "32,8",
        ),
        *(
            "--model",
            "resnet50_cifar",
            "--precision",
            "tf32",
            "--epoch-images",
            "2",
            "--slow-down",
            "10",
            "--rounds",
            "3",
        ),
        *(
            "--link-bandwidth",
            "450",
            "--project-to",
            "16,2",
            *("--node-size", "4"),
            *BETWEEN,
            "--deadline",
            "0.5",
            "--benchmark-compare-fail=median:5%",
            "--benchmark-compare",
        ),
        gpus=2,
    )
    assert (options.world_sizes, options.batch_sizes, options.batch_sweep) == ((1, 2), (16, 64), (16, 64))
    assert (options.global_batch_sizes, options.model, options.precision) == (
        (8, 32),
        "resnet50_cifar",
        "tf32",
    )
    assert (options.epoch_images, options.delay_seconds, options.rounds, options.deadline_seconds) == (
        2,
        10.0,
        3,
        0.5,
    )
    network = Network(latency=5e-6, bandwidth=50e9)
    assert options.links == Links(bytes_per_second=450e9, node=4, network=network, project_to=(2, 16))
    assert options.slower_ratio == pytest.approx(1.05)
    assert read("--precision", "bf16", "--epoch-images", "50000").precision == "bf16", "which the CPU has"


def test_a_step_and_an_epoch_are_as_the_options_say(read: Callable[..., Options]) -> None:
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
def test_a_name_that_can_be_no_models_is_refused_untried(
    read: Callable[..., Options], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpperf.plugin.options.parser.check_model", lambda *_: pytest.fail("it was tried"))
    known = "--model: model must be one of resnet18, .*, torchvision:NAME or package.module:function"
    with pytest.raises(pytest.UsageError, match=f"^{known}, got {re.escape(repr(name))}; name one of these$"):
        read("--model", name)


def test_more_classes_than_a_cifar_model_has_outputs_are_refused(
    read: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    hundred = Data(name="imagefolder", path=Path("x.pt"), digest="ab", train_images=5000, classes=100)
    monkeypatch.setattr("ddpperf.plugin.options.parser.prepare", lambda *_: hundred)
    assert read("--model", "resnet18").data.classes == 100
    with pytest.raises(
        pytest.UsageError, match="--model resnet18_cifar has 10 outputs, imagefolder 100 classes; pass"
    ):
        read("--model", "resnet18_cifar")


def test_the_vit_is_measured_on_gpus_with_images_of_its_size_only(read: Callable[..., Options]) -> None:
    options = read(gpus=4)
    heavy = [case for case in weak_scaling(options) if isinstance(case, TrainingSpec) and case.model == HEAVY]
    assert [case.world_size for case in heavy] == [1, 2, 4]
    larger = dataclasses.replace(options, data=dataclasses.replace(options.data, image_size=(64, 64)))
    skipped = [case for case in weak_scaling(larger) if not isinstance(case, Spec)]
    assert [case.values for case in skipped] == [(case,) for case in heavy]
    assert "is built for images of 32x32" in str(skipped[0].marks)


def test_images_of_a_data_set_are_known_by_their_digest(tmp_path: Path, read: Callable[..., Options]) -> None:
    options = read()
    data = Data(name="imagefolder", path=tmp_path / "x.pt", digest="0123456789ab", train_images=7)
    spec = Options(**{**vars(options), "data": data}).step(world_size=1, per_rank_batch_size=2)
    assert (spec.data, spec.digest) == ("imagefolder", "0123456789ab")


def test_an_own_model_keeps_its_own_memory_format(read: Callable[..., Options]) -> None:
    spec = Options(**{**vars(read(gpus=2)), "model": "mine:make"}).step(world_size=1, per_rank_batch_size=2)
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
def test_an_experiment_lies_in_a_folder_called_perf(test: str, experiment: bool) -> None:
    assert is_experiment(test) is experiment


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cuda"], "world_size=2 needs 2 GPUs, found 0; pass --device cpu"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'; pass one of them"),
        (["--world-sizes", "0"], "--world-sizes takes whole numbers from 1 to 999999999, got '0'"),
        (["--world-sizes", "2,2"], "--world-sizes names a size twice, got '2,2'; name each once"),
        (["--world-sizes", "4096"], "--world-sizes goes up to 1024, got 4096; pass fewer ranks"),
        (["--batch-sizes", "32,"], "--batch-sizes takes whole numbers from 1 to 999999999, got ''"),
        (
            ["--global-batch-sizes", "none"],
            "--global-batch-sizes takes whole numbers from 1 to 999999999, got 'none'",
        ),
        (
            ["--world-sizes", "1,2,3", "--global-batch-sizes", "12,64"],
            "--global-batch-sizes 64 does not divide over 3 ranks; pass a multiple of 3, or other --world-sizes",
        ),
        (
            ["--model", "vgg16"],
            "--model: model must be one of resnet18, resnet18_cifar, resnet50_cifar, resnet10_cifar,",
        ),
        (
            ["--precision", "fp8"],
            "--precision must be one of fp32, tf32, bf16, fp16, got 'fp8'; pass one of them",
        ),
        (["--precision", "fp16"], "--precision fp16 needs a GPU, this runs on the CPU; pass fp32 or bf16"),
        (["--precision", "tf32"], "--precision tf32 needs a GPU, this runs on the CPU; pass fp32 or bf16"),
        (
            ["--data", "nonsense"],
            "--data must be synthetic, cifar10[:DIR] or imagefolder:DIR, got 'nonsense'; pass one of them",
        ),
        (
            ["--model", "mine:make", "--data", "cifar10"],
            "--model mine:make makes its own batches, got --data, too",
        ),
        (["--epoch-images", "0"], "--epoch-images takes whole numbers from 1 to 999999999, got '0'"),
        (
            ["--epoch-images", "50001"],
            "--epoch-images takes 2 to 50000 images, an image a rank and what the data set synthetic",
        ),
        (
            ["--epoch-images", "1"],
            "--epoch-images takes 2 to 50000 images, an image a rank and what the data set synthetic",
        ),
        (
            ["--link-bandwidth", "0"],
            "--link-bandwidth takes GB/s above 0 and up to 100000, got '0'; pass for example",
        ),
        (["--link-bandwidth", "-450"], "--link-bandwidth takes GB/s above 0 and up to 100000, got '-450'"),
        (["--link-bandwidth", "nan"], "--link-bandwidth takes GB/s above 0 and up to 100000, got 'nan'"),
        (["--link-bandwidth", "fast"], "--link-bandwidth takes GB/s above 0 and up to 100000, got 'fast'"),
        (
            ["--buffer-sizes", "1KB"],
            "--buffer-sizes takes sizes from 4B to 8GiB, got '1KB'; pass for example --buffer-sizes 1KiB,64MiB",
        ),
        (["--buffer-sizes", "0"], "--buffer-sizes takes sizes from 4B to 8GiB, got '0'"),
        (["--buffer-sizes", "1KiB,9GiB"], "--buffer-sizes takes sizes from 4B to 8GiB, got '9GiB'"),
        (
            ["--buffer-sizes", "1KiB,1026B"],
            "--buffer-sizes 1026B is no whole number of float32, of 4 bytes each; name a multiple of 4",
        ),
        (
            ["--buffer-sizes", "1KiB,1024"],
            "--buffer-sizes names a size twice, got '1KiB,1024'; name each once",
        ),
        (
            ["--project-to", "16"],
            "--project-to 16 is beyond one node of 2 devices; give --node-latency and --node-bandwidth",
        ),
        (
            ["--project-to", "1,4"],
            "--project-to 1 is one device, beside which others are laid; name 2 or more",
        ),
        (["--project-to", "2048"], "--project-to goes up to 1024, got 2048; name fewer devices"),
        (
            ["--project-to", "5", *BETWEEN],
            "--project-to 5 is no whole number of nodes of 2 devices; name a multiple",
        ),
        (
            ["--checkpoints", "kept", "--replicates", "2"],
            "--checkpoints is of one process set, got two sides or --replicates; leave one of them out",
        ),
        (
            ["--node-size", "1"],
            "--node-size 1 is less than the 2 devices of this run; give those of a whole node",
        ),
        (["--node-size", "0"], "--node-size takes whole numbers from 1 to 999999999, got '0'"),
        (
            ["--node-latency", "1e-6"],
            "--node-latency and --node-bandwidth go together, got one of them; give both",
        ),
        (
            ["--node-latency", "-1", "--node-bandwidth", "50"],
            "--node-latency takes seconds above 0 and up to 1, got '-1'",
        ),
        (
            ["--node-latency", "1e-6", "--node-bandwidth", "0"],
            "--node-bandwidth takes GB/s above 0 and up to 100000, got '0'",
        ),
        (
            ["--slow-down", "0"],
            "--slow-down takes seconds above 0 and up to 10, got '0'; pass for example --slow-down 0.5",
        ),
        (["--slow-down", "nan"], "--slow-down takes seconds above 0 and up to 10, got 'nan'"),
        (["--slow-down", "99"], "--slow-down takes seconds above 0 and up to 10, got '99'"),
        (["--rounds", "9" * 5000], "--rounds takes whole numbers from 1 to 999999999, got '999999"),
        (["--deadline", "never"], "--deadline takes seconds above 0 and up to 86400, got 'never'"),
        (
            ["--worker-logs", "pytest.ini"],
            "--worker-logs takes a folder that can be written, got 'pytest.ini'",
        ),
        (["--benchmark-compare="], "--benchmark-compare takes the word after it, got ''"),
        (["--benchmark-compare", "perf"], "--benchmark-compare takes the word after it, got 'perf'"),
        (["-p", "no:benchmark"], "ddpperf needs pytest-benchmark, which was not loaded"),
        (["--benchmark-storage", "elsewhere"], "--benchmark-storage is not used"),
        (["--benchmark-compare-fail=median:5%"], "--benchmark-compare-fail needs a baseline to compare with"),
        (
            [
                "--benchmark-compare-fail=median:5%",
                "--benchmark-compare-fail=median:90%",
                "--benchmark-compare",
            ],
            "--benchmark-compare-fail takes one median:N%",
        ),
        (
            ["--benchmark-compare-fail=min:5%", "--benchmark-compare"],
            "--benchmark-compare-fail takes one median:N%",
        ),
    ],
    ids=lambda value: "_".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_sentence_and_status_4(
    project: Project, arguments: list[str], sentence: str
) -> None:
    run = project.run("perf", *arguments)
    run.assert_one_sentence(4, f"ERROR: {sentence}")
    assert project.saved_runs() == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[[threshold", "perf/thresholds.toml is no TOML that can be read"),
        (
            THRESHOLD.encode() + b"speed = 1\n",
            "threshold 1 of perf/thresholds.toml has the unknown key 'speed'; write speedup",
        ),
    ],
)
def test_a_broken_file_of_thresholds_is_one_sentence_and_status_4(
    project: Project, content: bytes, sentence: str
) -> None:
    (project.root / "perf" / "thresholds.toml").write_bytes(content)
    project.run().assert_one_sentence(4, f"ERROR: {sentence}")
    assert project.saved_runs() == []
