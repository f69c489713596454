"""Options: the defaults of each machine, and one sentence for each mistake."""

from __future__ import annotations

import re

import pytest

from ddpperf.plugin.options import check_world_sizes, default_world_sizes
from tests.project import Project


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cpu", 0, (1, 2)),
        ("cpu", 8, (1, 2)),
        ("cuda", 0, (1,)),
        ("cuda", 1, (1,)),
        ("cuda", 2, (1, 2)),
        ("cuda", 4, (1, 2, 4)),
        ("cuda", 6, (1, 2, 4, 6)),
        ("cuda", 8, (1, 2, 4, 8)),
    ],
)
def test_world_sizes_default_to_powers_of_two_and_all_gpus(device: str, gpus: int, expected: tuple[int, ...]) -> None:
    assert default_world_sizes(device, gpus) == expected


@pytest.mark.parametrize(
    ("world_sizes", "gpus", "sentence"),
    [
        ((1, 8), 4, "world_size=8 needs 8 GPUs, found 4; pass --world-sizes 1,2,4 or --device cpu"),
        ((1,), 0, "world_size=1 needs 1 GPU, found 0; pass --device cpu"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_what_would_do(world_sizes: tuple[int, ...], gpus: int, sentence: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(sentence)}$"):
        check_world_sizes(world_sizes, "cuda", gpus)


def test_as_many_ranks_as_gpus_or_more_ranks_than_cores_are_allowed() -> None:
    check_world_sizes((1, 4), "cuda", 4)
    check_world_sizes((64,), "cpu", 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cuda"], "world_size=2 needs 2 GPUs, found 0; pass --device cpu"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'; pass one of them"),
        (["--world-sizes", "0"], "--world-sizes takes whole numbers from 1 to 999999, got '0'"),
        (["--world-sizes", "two"], "--world-sizes takes whole numbers from 1 to 999999, got 'two'"),
        (["--world-sizes", "2,2"], "--world-sizes names a size twice, got '2,2'; name each once"),
        (["--world-sizes", "4096"], "--world-sizes goes up to 1024, got 4096; pass fewer ranks"),
        (["--batch-sizes", "32,"], "--batch-sizes takes whole numbers from 1 to 999999, got ''"),
        (["--rounds", "0"], "--rounds takes whole numbers from 1 to 999999, got '0'"),
        (["--rounds", "9" * 5000], "--rounds takes whole numbers from 1 to 999999, got '999999"),
        (["--deadline", "never"], "--deadline takes seconds above 0 and up to 86400, got 'never'"),
        (["--deadline", "nan"], "--deadline takes seconds above 0 and up to 86400, got 'nan'"),
        (["--worker-logs", "pytest.ini"], "--worker-logs takes a folder that can be written, got 'pytest.ini'"),
        (["--benchmark-compare="], "--benchmark-compare takes the word after it, got ''"),
        (["--benchmark-compare", "perf"], "--benchmark-compare takes the word after it, got 'perf'"),
        (["-p", "no:benchmark"], "ddpperf needs pytest-benchmark, which was not loaded"),
        (["--benchmark-storage", "elsewhere"], "--benchmark-storage is not used"),
        (["--benchmark-compare-fail=median:5%"], "--benchmark-compare-fail needs a baseline to compare with"),
        (
            ["--benchmark-compare-fail=median:5%", "--benchmark-compare-fail=median:90%", "--benchmark-compare"],
            "--benchmark-compare-fail takes one median:N%",
        ),
        (["--benchmark-compare-fail=min:5%", "--benchmark-compare"], "--benchmark-compare-fail takes one median:N%"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_sentence_and_status_4(project: Project, arguments: list[str], sentence: str) -> None:
    run = project.run("perf", *arguments)
    run.assert_one_sentence(4, f"ERROR: {sentence}")
    assert project.saved_runs() == []
