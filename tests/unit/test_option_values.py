"""The options' values, each by itself: what is taken, and one sentence for what is not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.plugin.options.values import (
    check_world_sizes,
    default_world_sizes,
    folder,
    seconds,
    whole_number,
)
from tests.generated import BOUNDED


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
def test_world_sizes_default_to_powers_of_two_and_all_gpus(
    device: str, gpus: int, expected: tuple[int, ...]
) -> None:
    assert default_world_sizes(device, gpus) == expected


@pytest.mark.parametrize(
    ("world_sizes", "gpus", "sentence"),
    [
        ((1, 8), 4, "world_size=8 needs 8 GPUs, found 4; pass --world-sizes 1,2,4 or --device cpu"),
        ((1,), 0, "world_size=1 needs 1 GPU, found 0; pass --device cpu"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_what_would_do(
    world_sizes: tuple[int, ...], gpus: int, sentence: str
) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(sentence)}$"):
        check_world_sizes(world_sizes, "cuda", gpus)


def test_as_many_ranks_as_gpus_or_more_ranks_than_cores_are_allowed() -> None:
    check_world_sizes((1, 4), "cuda", 4)
    check_world_sizes((64,), "cpu", 0)
    check_world_sizes((1024,), "cpu", 0)


@pytest.mark.parametrize(("text", "value"), [("1", 1), (" 2 ", 2), ("999999", 999999), ("007", 7)])
def test_a_whole_number_is_taken(text: str, value: int) -> None:
    assert whole_number("--rounds", text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "+1", "1.0", "1e3", "two", "٣", "²", "1_0", "1000000000"])
def test_what_is_no_whole_number_in_range_is_refused(text: str) -> None:
    sentence = f"--rounds takes whole numbers from 1 to 999999999, got {text!r}; pass for example --rounds 2"
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(sentence)}$"):
        whole_number("--rounds", text)


@BOUNDED
@given(st.floats(), st.floats(1e-3, 1e6))
def test_seconds_above_0_up_to_the_most_are_taken_and_no_others(value: float, most: float) -> None:
    if 0 < value <= most:
        assert seconds("--deadline", repr(value), most) == value
    else:
        with pytest.raises(
            pytest.UsageError,
            match=r"^--deadline takes seconds above 0 and up to .*, got .*; pass for example",
        ):
            seconds("--deadline", repr(value), most)


def test_the_most_seconds_are_taken() -> None:
    assert seconds("--slow-down", "10", 10) == 10
    with pytest.raises(pytest.UsageError, match=r"^--slow-down takes seconds above 0 and up to 10, got"):
        seconds("--slow-down", repr(math.nextafter(10, 11)), 10)


def test_a_folder_is_made_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder("--worker-logs", "a/b") == tmp_path.resolve() / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert folder("--worker-logs", "a/b") == tmp_path.resolve() / "a" / "b", (
        "one that is there is taken as it is"
    )
    (tmp_path / "file").touch()
    with pytest.raises(pytest.UsageError, match=r"got 'file/b' \(Not a directory\); name another$"):
        folder("--worker-logs", "file/b")
