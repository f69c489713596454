"""The thresholds file: strict reading, the cases that a threshold applies to, and violations."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib

import pytest

from ddpperf.errors import Refused
from ddpperf.specs import TrainingSpec
from ddpperf.verdict.thresholds import HardwareThresholds, Threshold, read_thresholds
from tests.canned import CannedSuite

PLACE = "threshold 1 of perf/thresholds.toml"
ENTRY = """
[[threshold]]
hardware = "h200x4"
test = "test_weak_scaling"
where = { world_size = 4, per_rank_batch_size = 512 }
speedup = 3.6
efficiency = 0.9
"""
STEP = TrainingSpec(world_size=4, per_rank_batch_size=512, strategy="ddp")


def entry(
    where: str = "{}", minimum: str = "speedup = 2", *, hardware: str = "h200x4", test: str = "test_x"
) -> str:
    return f'[[threshold]]\nhardware = "{hardware}"\ntest = "{test}"\nwhere = {where}\n{minimum}\n'


def read(text: str) -> tuple[Threshold, ...]:
    return read_thresholds(tomllib.loads(text))


def threshold(where: str = "{}", minimum: str = "speedup = 2") -> Threshold:
    return read(entry(where, minimum))[0]


# --- reading


def test_entries_are_read_in_the_files_order() -> None:
    first, second = read(ENTRY + entry().replace("where = {}\n", ""))
    assert first == Threshold(
        hardware="h200x4",
        test="test_weak_scaling",
        where={"world_size": 4, "per_rank_batch_size": 512},
        bounds={"speedup": 3.6, "efficiency": 0.9},
        number=1,
    )
    assert (second.test, second.where, second.number) == ("test_x", {}, 2)
    assert read("[decision.gpu]\nmargin = 0.004\n") == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (entry().replace('hardware = "h200x4"', ""), "has no hardware; add one"),
        (entry().replace('test = "test_x"', ""), "has no test; add one"),
        (entry(test="test_x[world_size=4]"), "has test = 'test_x[world_size=4]'; write only the function's"),
        (entry(minimum="speed_up = 2"), "has the unknown key 'speed_up'; write speedup"),
        (entry(minimum=""), "has no minimum and no maximum, so it could never fail; add one of "),
        (entry("{ worldsize = 4 }"), "names 'worldsize' in where, a field that no spec has; write world_siz"),
        (entry("{ delay_seconds = 0.0 }"), "names delay_seconds in where, but holds for delayed steps, too"),
        (entry("{ world_size = '4' }"), "can never apply: world_size must be a whole number"),
        (entry("{ world_size = true }"), "can never apply: world_size must be a whole number"),
        (entry("{ world_size = 0 }"), "can never apply: world_size must be a whole number of at least "),
        (entry("{ drop_last = 1 }"), "can never apply: drop_last must be a bool, got 1"),
        (entry("{ strategy = 'dpp' }"), "can never apply: strategy must be one of single, ddp, "),
        (entry("{ nbytes = 1024, strategy = 'ddp' }"), "names nbytes, strategy in where, but no spec has al"),
    ],
)
def test_entry_that_could_never_fail_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(Refused, match=f"^threshold 2 of perf/thresholds.toml {re.escape(sentence)}"):
        read(ENTRY + text)
    with pytest.raises(Refused, match="has the unknown key 'thresholds'; begin every entry with "):
        read(ENTRY.replace("threshold", "thresholds"))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "true", "'2'"])
def test_bound_must_be_positive_and_finite(value: str) -> None:
    with pytest.raises(Refused, match=r"has efficiency = .*; write a positive finite number$"):
        threshold(minimum=f"speedup = 2\nefficiency = {value}")


def test_bound_given_twice_is_refused() -> None:
    other = entry("{ world_size = 2 }") + entry(hardware="h200x2") + entry(test="test_y")
    read(entry() + other)
    with pytest.raises(Refused, match=r"^threshold 5 .* repeats this case's speedup of threshold 1; "):
        read(entry() + other + entry(minimum="images_per_second = 1\nspeedup = 3"))


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"# \xff\xfe", "is not in UTF-8"), (b"[[threshold", "is not valid TOML (")]
)
def test_broken_file_is_refused(canned_suite: CannedSuite, content: bytes, sentence: str) -> None:
    (canned_suite.root / "perf" / "thresholds.toml").write_bytes(content)
    canned_suite.run("perf").assert_one_sentence(4, f"ERROR: perf/thresholds.toml {sentence}")


# --- applying


def test_threshold_applies_to_equal_fields() -> None:
    (one,) = read(ENTRY)
    assert one.applies("test_weak_scaling", STEP)
    assert one.applies("test_weak_scaling", dataclasses.replace(STEP, precision="bf16", delay_seconds=0.01))
    assert not one.applies("test_strong_scaling", STEP)
    assert not one.applies("test_weak_scaling", dataclasses.replace(STEP, world_size=2))
    assert not threshold("{ nbytes = 1024 }").applies("test_x", STEP)
    assert threshold("{ comm_delay_seconds = 0 }").applies("test_x", STEP)


@pytest.mark.parametrize(("hardware", "applied"), [("h200x4", True), ("h200x2", False), ("*", True)])
def test_threshold_applies_on_its_hardware(hardware: str, applied: bool) -> None:
    known = HardwareThresholds(read(entry(hardware=hardware)), "h200x4")
    assert bool(known.violations("a", "test_x", STEP, {"speedup": 1.0})) == applied
    assert known.to_json()["known"] == applied


def test_each_bound_is_recorded_with_its_value() -> None:
    known = HardwareThresholds(read(ENTRY), "h200x4")
    known.violations("a", "test_weak_scaling", STEP, {"speedup": 1.0, "efficiency": 1.0})
    known.violations("a", "test_weak_scaling", STEP, {"speedup": 3.7})  # measured again
    found = {"test": "a", "kind": "floor"}
    assert known.to_json()["checks"] == [
        found | {"metric": "speedup", "value": 3.7, "bound": 3.6, "held": True},
        found | {"metric": "efficiency", "value": None, "bound": 0.9, "held": False},
    ]


# --- violations


@pytest.mark.parametrize(
    ("bound", "value", "sentence"),
    [
        ("speedup = 3.6", 3.6, ""),
        ("cpu_seconds = 0.005", 0.005, ""),
        ("speedup = 3.6", 3.41, "speedup 3.41x is below 3.60x, the minimum of"),
        ("speedup = 2.0", 1.99912345678, "speedup 1.99912 is below 2, the minimum of"),
        ("busbw_bytes_per_second = 2.1e11", 2.0998e11, "busbw 2.0998e+11 B/s is below 2.1e+11 B/s, the"),
        ("cpu_seconds = 0.005", 0.0052, "CPU time 5.200 ms is above 5.000 ms, the maximum of"),
        ("gradients_over_parameters = 1", 1.0, ""),
        ("gradients_over_parameters = 1", 0.5, "gradients over parameters 50.0% is not 100.0%, the value of"),
        ("speedup = 2", None, "speedup was not measured, "),
        ("speedup = 2", math.inf, "speedup is inf, which is no finite number, "),
        ("speedup = 2", math.nan, "speedup is nan, which is no finite number, "),
        ("cpu_seconds = 2", -math.inf, "CPU time is -inf, which is no finite number, "),
    ],
)
def test_violation_names_value_and_bound(bound: str, value: float | None, sentence: str) -> None:
    metric = bound.split()[0]
    known = HardwareThresholds(read(entry(minimum=bound)), "h200x4")
    found = known.violations("a", "test_x", STEP, {} if value is None else {metric: value})
    if not sentence:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(sentence)
        assert PLACE in found[0]
