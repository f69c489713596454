"""The thresholds file: strict reading, the cases that a threshold applies to, and violations."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.metrics import Better
from ddpperf.specs import AllReduceSpec, EpochSpec, Fault, SamplerSpec, Spec, TrainingSpec
from ddpperf.verdict.thresholds import (
    NEVER_NAMED,
    HardwareThresholds,
    Threshold,
    bounded_metrics,
    read_document,
    read_thresholds,
)
from tests.generated import BOUNDED

METRICS, GREATEST = bounded_metrics(Better.HIGHER), bounded_metrics(Better.LOWER)

PLACE = "threshold 1 of perf/thresholds.toml"
ENTRY = """
[[threshold]]
hardware = "h200x4"
test = "test_weak_scaling"
where = { world_size = 4, per_rank_batch_size = 512 }
speedup = 3.6
efficiency = 0.9
"""
KNOWN = ", ".join(METRICS + GREATEST)
CELL = TrainingSpec(world_size=4, per_rank_batch_size=512, strategy="ddp")
SPECS: tuple[Spec, ...] = (
    CELL,
    EpochSpec(
        world_size=1,
        per_rank_batch_size=32,
        strategy="single",
        input="dataloader",
        loader_workers=2,
        drop_last=False,
    ),
    AllReduceSpec(world_size=2, nbytes=1024),
    SamplerSpec(world_size=3, epoch_images=100),
)


def entry(
    where: str = "{}", minimum: str = "speedup = 2", *, hardware: str = "h200x4", test: str = "test_x"
) -> str:
    return f'[[threshold]]\nhardware = "{hardware}"\ntest = "{test}"\nwhere = {where}\n{minimum}\n'


def read(text: str) -> tuple[Threshold, ...]:
    return read_thresholds(read_document(text))


def threshold(where: str = "{}", minimum: str = "speedup = 2") -> Threshold:
    return read(entry(where, minimum))[0]


def applies(one: Threshold, spec: Spec) -> bool:
    return one.applies("test_x", spec)


# --- reading


def test_entries_are_read_in_the_files_order() -> None:
    first, second = read(ENTRY + entry())
    assert first == Threshold(
        hardware="h200x4",
        test="test_weak_scaling",
        where={"world_size": 4, "per_rank_batch_size": 512},
        bounds={"speedup": 3.6, "efficiency": 0.9},
        number=1,
    )
    assert (second.test, second.where, second.number) == ("test_x", {}, 2)


def test_cpu_seconds_are_a_maximum() -> None:
    one = threshold(minimum="speedup = 2\ncpu_seconds = 0.005")
    assert one.bounds == {"speedup": 2, "cpu_seconds": 0.005}
    below, above = one.violations({"speedup": 1.0, "cpu_seconds": 1.0})
    assert " is below " in below
    assert " is above " in above


def test_where_may_be_absent_and_a_file_empty() -> None:
    (one,) = read(entry().replace("where = {}\n", ""))
    assert one == threshold()
    assert read("# nothing yet\n") == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[[threshold]\n",
            "perf/thresholds.toml is not valid TOML (Expected ']]' at the end of an array declaration (at ",
        ),
        ("x = " + "[" * 5000, "perf/thresholds.toml is not valid TOML ("),
        (entry() + "speedup = 3", "perf/thresholds.toml is not valid TOML (Cannot overwrite a value"),
        (
            "[[thresholds]]\n",
            "perf/thresholds.toml has the unknown key 'thresholds'; begin every entry with [[threshold]], ",
        ),
        (
            "[threshold]\n",
            "the key threshold of perf/thresholds.toml is no list of entries; begin every entry with ",
        ),
        (
            "threshold = [1]\n",
            "the key threshold of perf/thresholds.toml is no list of entries; begin every entry with ",
        ),
    ],
)
def test_what_is_no_list_of_entries_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        read(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (entry().replace('hardware = "h200x4"', ""), "has no hardware; add one, such as hardware = 'h200x4'"),
        (entry().replace('test = "test_x"', ""), "has no test; add one, such as test = 'test_weak_scaling'"),
        (entry(hardware=""), "has hardware = ''; write a name, such as 'h200x4'"),
        (entry().replace('"test_x"', "4"), "has test = 4; write a name, such as 'test_weak_scaling'"),
        (
            entry(test="test_x[world_size=4]"),
            "has test = 'test_x[world_size=4]'; write only the function's name, and the case's fields "
            "in where",
        ),
        (entry(minimum="speed_up = 2"), "has the unknown key 'speed_up'; write speedup"),
        (entry(minimum="zzz = 2"), f"has the unknown key 'zzz'; use hardware, test, where, {METRICS[0]}"),
        (entry(minimum="cpu_second = 2"), "has the unknown key 'cpu_second'; write cpu_seconds"),
        (entry(minimum=""), f"has no minimum and no maximum, so it could never fail; add one of {KNOWN}"),
        (entry(where="4"), "has where = 4; write a table, such as where = { world_size = 4 }"),
        (
            entry("{ worldsize = 4 }"),
            "names 'worldsize' in where, a field that no spec has; write world_size",
        ),
        (entry("{ measurement = 'all_reduce' }"), "names 'measurement' in where, a field that no spec has; "),
        (
            entry("{ delay_seconds = 0.0 }"),
            "names delay_seconds in where, but holds with and without it; delete delay_seconds",
        ),
        (entry("{ fault = 'kill' }"), "names fault in where, but holds with and without it; delete fault"),
        (entry("{ world_size = '4' }"), "has world_size = '4' in where; write a whole number"),
        (entry("{ world_size = 4.0 }"), "has world_size = 4.0 in where; write a whole number"),
        (entry("{ world_size = true }"), "has world_size = True in where; write a whole number"),
        (entry("{ world_size = [4] }"), "has world_size = [4] in where; write a whole number"),
        (entry("{ drop_last = 1 }"), "has drop_last = 1 in where; write true or false"),
        (entry("{ model = 18 }"), "has model = 18 in where; write a string"),
        (entry("{ strategy = 'dpp' }"), "has strategy = 'dpp' in where; write 'single' or 'ddp'"),
        (
            entry("{ nbytes = 1024, strategy = 'ddp' }"),
            "names nbytes, strategy in where, but no spec has all of these; keep one spec's fields",
        ),
    ],
)
def test_an_entry_that_could_never_fail_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^threshold 2 of perf/thresholds.toml {re.escape(sentence)}"):
        read(ENTRY + text)


@pytest.mark.parametrize(
    "value",
    [
        "0",
        "-1",
        "0.0",
        "nan",
        "inf",
        "true",
        "'2'",
        "[2]",
        "{}",
        "2026-11-20",
        "1" + "0" * 400,
        pytest.param("0x" + "f" * 4000, id="hexadecimal"),
    ],
)
@pytest.mark.parametrize("metric", ["efficiency", "cpu_seconds"])
def test_bound_must_be_positive_and_finite(metric: str, value: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^threshold 1 of perf/thresholds.toml has {metric} = .*; write a positive finite number$",
    ):
        threshold(minimum=f"speedup = 2\n{metric} = {value}")


def test_a_bound_given_twice_is_refused() -> None:
    other = (
        entry("{ world_size = 2 }")
        + entry(hardware="h200x2")
        + entry(test="test_y")
        + entry(minimum="efficiency = 0.5")
    )
    read(entry() + other)
    sentence = (
        "threshold 6 of perf/thresholds.toml gives the same case's speedup as threshold 1; delete one of them"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read(entry() + other + entry(minimum="images_per_second = 1\nspeedup = 3"))
    with pytest.raises(
        ValueError,
        match=r"^threshold 2 of perf/thresholds\.toml gives the same case's cpu_seconds as threshold 1",
    ):
        read(entry(minimum="speedup = 2\ncpu_seconds = 1") + entry(minimum="cpu_seconds = 2"))


def test_order_of_fields_makes_no_other_case() -> None:
    one, other = "{ world_size = 4, nbytes = 1024 }", "{ nbytes = 1024, world_size = 4 }"
    with pytest.raises(
        ValueError,
        match=r"^threshold 2 of perf/thresholds\.toml gives the same case's speedup as threshold 1",
    ):
        read(entry(one) + entry(other))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.measurement)
def test_every_spec_field_can_be_named(spec: Spec) -> None:
    """Whatever fields specs get: what a spec holds can be written, and then it applies to that spec."""
    for name in (field.name for field in dataclasses.fields(spec) if field.name not in NEVER_NAMED):
        value = getattr(spec, name)
        written = str(value).lower() if isinstance(value, bool) else repr(value)
        assert value is None or applies(threshold(f"{{ {name} = {written} }}"), spec)  # TOML has no None


# --- applying


def test_threshold_applies_to_equal_fields() -> None:
    (one,) = read(ENTRY)
    assert one.applies("test_weak_scaling", CELL)
    assert one.applies("test_weak_scaling", dataclasses.replace(CELL, precision="bf16"))
    assert not one.applies("test_strong_scaling", CELL)
    assert not one.applies("test_weak_scaling", dataclasses.replace(CELL, world_size=2))
    assert not one.applies("test_weak_scaling", dataclasses.replace(CELL, per_rank_batch_size=32))


def test_thresholds_of_other_hardware_do_not_apply() -> None:
    for hardware, applied in (("h200x4", 1), ("h200x2", 0)):
        known = HardwareThresholds(read(ENTRY), hardware)
        assert bool(known.violations("a", "test_weak_scaling", CELL, {})) == bool(applied)
        assert (known.to_json()["applied"], known.to_json()["known"]) == (applied, applied)


def test_threshold_of_every_machine_applies_on_any_hardware() -> None:
    (one,) = read(entry(hardware="*"))
    (sentence,) = HardwareThresholds([one], "b300x9").violations("a", "test_x", CELL, {"speedup": 1.0})
    assert sentence == "speedup 1.00x is below 2.00x, the minimum of threshold 1 of perf/thresholds.toml"


def test_each_bound_is_recorded_with_its_value() -> None:
    known = HardwareThresholds(read(ENTRY), "h200x4")
    known.violations("a", "test_weak_scaling", CELL, {"speedup": 1.0, "efficiency": 1.0})
    known.violations("a", "test_weak_scaling", CELL, {"speedup": 3.7})  # measured again
    found = {"test": "a", "kind": "floor"}
    assert known.to_json()["checks"] == [
        found | {"metric": "speedup", "value": 3.7, "bound": 3.6, "held": True},
        found | {"metric": "efficiency", "value": None, "bound": 0.9, "held": False},
    ]


@pytest.mark.parametrize(("value", "found"), [(1.0, ""), (0.5, "50.0%"), (1.5, "150.0%")])
def test_exact_metric_must_equal_its_bound(value: float, found: str) -> None:
    one = threshold(minimum="gradients_over_parameters = 1")
    sentence = f"gradients over parameters {found} is not 100.0%, the value of {PLACE}"
    assert one.violations({"gradients_over_parameters": value}) == [sentence] * bool(found)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.99912345678, "1.99912 is below 2,"), (math.nextafter(2, 0), "1.9999999999999998 is below 2.0,")],
)
def test_value_near_its_bound_is_shown_with_more_digits(value: float, shown: str) -> None:
    """Not as 2.00x, which is not below 2.00x."""
    (sentence,) = threshold(minimum="speedup = 2.0").violations({"speedup": value})
    assert sentence == f"speedup {shown} the minimum of {PLACE}"


def test_more_digits_have_a_unit() -> None:
    (sentence,) = threshold(minimum="busbw_bytes_per_second = 2.1e11").violations(
        {"busbw_bytes_per_second": 2.0998e11}
    )
    assert sentence == f"busbw 2.0998e+11 B/s is below 2.1e+11 B/s, the minimum of {PLACE}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.measurement)
def test_without_where_every_spec_is_meant(spec: Spec) -> None:
    assert applies(threshold(), spec)


def test_a_spec_without_the_field_is_not_meant() -> None:
    assert not applies(threshold("{ nbytes = 1024 }"), CELL)
    assert applies(threshold("{ nbytes = 1024 }"), AllReduceSpec(world_size=2, nbytes=1024))


@pytest.mark.parametrize(("name", "value"), [("world_size", True), ("world_size", 1.0), ("drop_last", 1)])
def test_fields_are_equal_in_type_too(name: str, value: float) -> None:
    spec = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single")
    assert getattr(spec, name) == value
    one = Threshold(hardware="h200x4", test="test_x", where={name: value}, bounds={}, number=1)
    assert not applies(one, spec)


def test_threshold_applies_to_slowed_steps() -> None:
    one = threshold("{ world_size = 4, per_rank_batch_size = 512 }")
    assert applies(one, dataclasses.replace(CELL, delay_seconds=0.01, fault=Fault(kind="hang", rank=0)))


# --- violations


def test_each_missed_minimum_is_a_violation() -> None:
    (one,) = read(ENTRY)
    assert one.violations({"speedup": 3.6, "efficiency": 0.95, "images_per_second": 1.0}) == []
    assert one.violations({"speedup": 3.41, "efficiency": 0.8525}) == [
        f"speedup 3.41x is below 3.60x, the minimum of {PLACE}",
        f"efficiency 85.2% is below 90.0%, the minimum of {PLACE}",
    ]


def test_each_exceeded_maximum_is_a_violation() -> None:
    one = threshold("{ world_size = 4 }", "speedup = 2\ncpu_seconds = 0.005")
    assert one.violations({"speedup": 9.0, "cpu_seconds": 0.005}) == []
    assert one.violations({"speedup": 1.0, "cpu_seconds": 0.0052}) == [
        f"speedup 1.00x is below 2.00x, the minimum of {PLACE}",
        f"CPU time 5.200 ms is above 5.000 ms, the maximum of {PLACE}",
    ]


@pytest.mark.parametrize(
    ("name", "required"), [("speedup", "at least 2.00x"), ("cpu_seconds", "at most 2.000 s")]
)
@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({}, "was not measured"),
        ({"speedup": math.nan, "cpu_seconds": math.nan}, "is nan, which is no finite number"),
        ({"speedup": math.inf, "cpu_seconds": math.inf}, "is inf, which is no finite number"),
        ({"speedup": -math.inf, "cpu_seconds": -math.inf}, "is -inf, which is no finite number"),
    ],
)
def test_a_metric_that_is_no_number_violates(
    metrics: dict[str, float], found: str, name: str, required: str
) -> None:
    heading = {"speedup": "speedup", "cpu_seconds": "CPU time"}[name]
    sentence = f"{heading} {found}, {PLACE} requires {required}"
    assert threshold(minimum=f"{name} = 2").violations(metrics) == [sentence]


@BOUNDED
@given(st.floats(min_value=1e-6, max_value=1e15), st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_only_finite_values_within_bounds_pass(bound: float, value: float | None) -> None:
    one = threshold(minimum=f"speedup = {bound!r}").violations({} if value is None else {"speedup": value})
    assert (one == []) == (value is not None and bound <= value < math.inf)
    one = threshold(minimum=f"cpu_seconds = {bound!r}").violations(
        {} if value is None else {"cpu_seconds": value}
    )
    assert (one == []) == (value is not None and -math.inf < value <= bound)
