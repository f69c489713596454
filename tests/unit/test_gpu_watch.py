"""Disturbances of rounds, from states as the driver reports them; no GPU is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.machine import gpu_watch
from ddpperf.machine.gpu_watch import (
    Disturbance,
    GpuState,
    GpuWatch,
    disturbance_texts,
    foreign,
    read_state,
    throttled,
)


def reading(
    at: float, held_ns: int | None = None, reasons: Collection[str] = (), processes: Collection[int] = ()
) -> GpuState:
    counted = {} if held_ns is None else {"power cap": held_ns}
    return GpuState(
        monotonic_seconds=at,
        violations_ns=counted,
        reasons=frozenset(reasons),
        processes=frozenset(processes),
    )


# --- throttled


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (reading(7.0, 5_000), reading(8.0, 10_005_000), set()),  # 1 % of the time
        (reading(7.0, 5_000), reading(8.0, 10_005_001), {"power cap"}),
        (reading(7.0, 5_000), reading(8.0, 0), set()),  # the driver started again
        (reading(7.0, 0), reading(8.0, 0, ["power cap"]), set()),  # the counter saw the whole time
        (reading(7.0, 0), reading(8.0, 0, ["power brake"]), {"power brake"}),  # nothing counts it
        (reading(7.0), reading(8.0, 900_000_000, ["power cap"]), {"power cap"}),  # no counter before
        (reading(7.0, reasons=["power cap"]), reading(8.0), set()),
    ],
)
def test_counters_decide_before_momentary_reasons(before: GpuState, now: GpuState, why: set[str]) -> None:
    assert throttled(before, now) == why


# --- other processes


@pytest.mark.parametrize(
    ("listed", "own", "before", "others"),
    [
        ({1, 2, 3}, {1, 2}, set(), {3}),
        ({501, 502, 503}, {1, 2}, {503}, {503}),  # the host's process ids: two of these may be ours
        ({501, 502}, {1, 2}, set(), set()),
        ({501}, {1, 2}, {503}, set()),  # it was there before, and has ended
    ],
)
def test_process_is_foreign_if_it_cannot_be_ours(
    listed: set[int], own: set[int], before: set[int], others: set[int]
) -> None:
    assert foreign(listed, own, before) == others


# --- sentences


def rounds_of(*disturbances: Disturbance | None) -> list[dict[int, Disturbance]]:
    """Return rounds in which GPU 0 is undisturbed and GPU 1 has these disturbances, None for none."""
    return [{0: Disturbance(), 1: each or Disturbance()} for each in disturbances]


HOT = Disturbance(throttled=frozenset({"temperature"}))
CAPPED = Disturbance(throttled=frozenset({"power cap"}))
JOINED = Disturbance(foreign=frozenset({12, 64}))
SHARED = Disturbance(foreign=frozenset({4711}))
FULL, NEAR, LOW = (
    Disturbance(megahertz=each) for each in (1980, 1941, 1940)
)  # 1940.4 is 2 % less than the first


@pytest.mark.parametrize(
    ("rounds", "warnings"),
    [
        (rounds_of(CAPPED, None, CAPPED), ["GPU 1 was throttled (power cap) during 2 of 3 rounds"]),
        (
            rounds_of(HOT, CAPPED, None),
            ["GPU 1 was throttled (power cap, temperature) during 2 of 3 rounds"],
        ),
        (rounds_of(None, SHARED, SHARED), ["process 4711 also uses GPU 1"]),
        (rounds_of(SHARED, JOINED), ["processes 12, 64, 4711 also use GPU 1"]),
        (rounds_of(FULL, NEAR, None), []),
        (rounds_of(FULL, None, LOW), ["GPU 1's clock was 1940 to 1980 MHz"]),
        (
            rounds_of(FULL, replace(LOW, throttled=CAPPED.throttled)),
            ["GPU 1 was throttled (power cap) during 1 of 2 rounds"],
        ),
    ],
)
def test_warning_names_gpu_and_disturbance(rounds: list[dict[int, Disturbance]], warnings: list[str]) -> None:
    assert disturbance_texts(rounds) == warnings


@pytest.mark.parametrize(
    ("rounds", "reasons"),
    [
        (rounds_of(HOT, HOT), ["GPU 1 was throttled (temperature)"]),  # the work's own it never is
        (rounds_of(None, CAPPED), []),
        (rounds_of(None, None, CAPPED), ["GPU 1 was throttled (power cap)"]),
        (rounds_of(FULL, NEAR), []),
        (rounds_of(LOW, FULL), []),  # the round before was the slower one
        (rounds_of(FULL, None, LOW), ["GPU 1's clock was 1940 MHz, of 1980"]),
        (
            rounds_of(replace(FULL, throttled=CAPPED.throttled), LOW),
            [],
        ),  # the work's own cap, which did not count here
        (rounds_of(FULL, replace(LOW, throttled=HOT.throttled)), ["GPU 1 was throttled (temperature)"]),
        (
            [{0: CAPPED}, {0: CAPPED}, {0: Disturbance(), 1: CAPPED}],
            ["GPU 1 was throttled (power cap)"],
        ),  # those were GPU 0's
    ],
)
def test_frequent_power_cap_does_not_spoil(rounds: list[dict[int, Disturbance]], reasons: list[str]) -> None:
    assert gpu_watch.spoiling(rounds) == reasons


# --- what NVML says


def test_unsupported_counters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (pynvml.c_nvmlFieldValue_t * len(gpu_watch.COUNTERS))()
    for value, (number, ns) in zip(values, {74: 2**40 + 1, 75: 0, 76: 3, 77: 4, 79: 5}.items(), strict=True):
        value.fieldId, value.value.ullVal = number, ns
    values[2].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda *_: values)
    assert read_state(object()).violations_ns == {
        "power cap": 2**40 + 1,
        "temperature": 0,
        "board limit": 4,
        "reliability limit": 5,
    }


def test_counter_numbers_are_nvmls() -> None:
    names = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "RELIABILITY")
    assert list(gpu_watch.COUNTERS) == [getattr(pynvml, f"NVML_FI_DEV_PERF_POLICY_{name}") for name in names]


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x1 + 0x2 + 0x100, set()),  # idle, and clocks that someone set
        (0x1 + 0x4 + 0x10, {"power cap", "sync boost"}),
        (0x8 + 0x20 + 0x40, {"hardware slowdown", "temperature", "hardware's temperature limit"}),
        (0x200 + 0x400, {"board limit", "reliability limit"}),  # which only some of NVML's own headers name
    ],
)
def test_chosen_clocks_are_not_throttled(
    monkeypatch: pytest.MonkeyPatch, bits: int, reasons: set[str]
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: handle)
    assert read_state(bits).reasons == reasons


def refused(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    "current", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_refused_query_leaves_the_others(monkeypatch: pytest.MonkeyPatch, current: str) -> None:
    for name in dir(pynvml):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(pynvml, name, refused)
    monkeypatch.setattr(pynvml, current, lambda handle: handle)
    assert read_state(0x84).reasons == {"power cap", "power brake"}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [SimpleNamespace(pid=4711)])
    assert read_state(0x1).processes == {4711}
    assert read_state(0x1).violations_ns == {}


def test_idle_gpu_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in dir(pynvml):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(pynvml, name, refused)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda _, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind])
    assert read_state(0x0).megahertz is None, "nobody tells whether it is idle"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: handle)
    assert read_state(pynvml.nvmlClocksThrottleReasonGpuIdle).megahertz is None
    assert read_state(0x4).megahertz == 1980


# --- the watch


def test_unknown_gpu_gives_no_warning() -> None:
    watch = GpuWatch(["GPU-00000000-0000-0000-0000-000000000000", "no uuid at all"])
    assert [watch.look({1}, done) for done in range(3)] == ["", "", ""]
    assert [note.text for note in watch.warnings()] == []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, deque[GpuState]]]:
    """The states that each GPU will report, by uuid; a test must use all of them."""
    script: dict[str, deque[GpuState]] = {}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: script[uuid]
    )  # raises for others, as NVML does
    monkeypatch.setattr(gpu_watch, "read_state", lambda readings: readings.popleft())
    yield script
    assert not any(script.values())


def test_rounds_are_forgotten_after_their_warnings(driver: dict[str, deque[GpuState]]) -> None:
    driver["GPU-b"] = deque(
        reading(at, held * 10**9) for at, held in enumerate((6, 7, 8, 8, 8, 8, 9))
    )  # 7 before all rounds
    watch = GpuWatch(["GPU-a", "GPU-b"])  # the driver does not know GPU-a
    assert [watch.look({1}, done) for done in range(4)] == [""] * 4
    assert [note.text for note in watch.warnings()] == [
        "GPU 1 was throttled (power cap) during 1 of 3 rounds"
    ]
    assert [note.text for note in watch.warnings()] == []
    assert [watch.look({1}, done) for done in range(2)] == [""] * 2
    assert [note.text for note in watch.warnings()] == ["GPU 1 was throttled (power cap) during 1 of 1 round"]


def test_earlier_processes_are_foreign_and_ended_ranks_are_not(driver: dict[str, deque[GpuState]]) -> None:
    lists = [9], [9, 501], [1, 2], [1, 3, 2], [3, 8], [3]
    driver["GPU-a"] = deque(reading(at, processes=listed) for at, listed in enumerate(lists))
    watch = GpuWatch(["GPU-a"])
    assert watch.look({1}, 1) == "process 9 also used GPU 0", "perhaps one of ours is listed as 501"
    assert [note.text for note in watch.warnings()] == ["process 9 also uses GPU 0"]
    assert watch.look({1, 2}, 1) == ""
    assert watch.look({1, 3}, 2) == "", "rank 2 was replaced and is still listed"
    assert watch.look({3}, 3) == "process 8 also used GPU 0"
    watch.look({3}, 0)
    assert [note.text for note in watch.warnings()] == [], "that was another measurement"


def test_changed_clock_is_found(driver: dict[str, deque[GpuState]]) -> None:
    """The driver reports no reason for the lower clock."""
    driver["GPU-a"] = deque(
        replace(reading(at), megahertz=each) for at, each in enumerate((345, 345, 1980, 1200, 1980, 1200))
    )
    watch = GpuWatch(["GPU-a"])
    assert [watch.look({1}, done) for done in (0, 1, 2, 2, 3)] == [
        "",
        "",
        "GPU 0's clock was 1200 MHz, of 1980",
        "",
        "GPU 0's clock was 1200 MHz, of 1980",
    ]
    assert [note.text for note in watch.warnings()] == [
        "GPU 0's clock was 1200 to 1980 MHz",
        "1 spoiled round was measured again: GPU 0's clock was 1200 MHz, of 1980",
    ]
