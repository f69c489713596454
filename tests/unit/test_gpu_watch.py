"""Disturbances of rounds, from states as the driver reports them; no GPU is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from ddpperf.machine import gpu_watch
from ddpperf.machine.gpu_watch import (
    Disturbance,
    GpuState,
    GpuWatch,
    foreign,
    read_state,
    throttled,
)
from tests.fake_nvml import field_values, install, refuses, training


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


# --- disturbed rounds


def rounds_of(*disturbances: Disturbance | None) -> list[dict[int, Disturbance]]:
    """Return rounds in which GPU 0 is undisturbed and GPU 1 has these disturbances, None for none."""
    return [{0: Disturbance(), 1: each or Disturbance()} for each in disturbances]


HOT = Disturbance(throttled=frozenset({"temperature"}))
CAPPED = Disturbance(throttled=frozenset({"power cap"}))
SHARED = Disturbance(foreign=frozenset({64, 12}))
FULL, NEAR, LOW = (Disturbance(megahertz=each) for each in (1980, 1941, 1940))  # 1940.4 is 2% below 1980


@pytest.mark.parametrize(
    ("rounds", "reasons"),
    [
        (rounds_of(HOT, HOT), ["GPU 1 was throttled (temperature)"]),  # the work's own it never is
        (rounds_of(None, CAPPED), []),
        (rounds_of(None, None, CAPPED), ["GPU 1 was throttled (power cap)"]),
        (rounds_of(None, SHARED), ["processes 12, 64 also used GPU 1"]),
        (rounds_of(FULL, NEAR), []),
        (rounds_of(LOW, FULL), []),  # the round before was the slower one
        (rounds_of(FULL, None, LOW), ["GPU 1's clock was below 1980 MHz"]),
        (rounds_of(replace(FULL, throttled=CAPPED.throttled), LOW), []),  # by the work's own cap
        (rounds_of(FULL, replace(LOW, throttled=HOT.throttled)), ["GPU 1 was throttled (temperature)"]),
        ([*[{0: CAPPED, 1: FULL}] * 2, {0: FULL, 1: CAPPED}], ["GPU 1 was throttled (power cap)"]),
    ],
)
def test_frequent_power_cap_does_not_spoil(rounds: list[dict[int, Disturbance]], reasons: list[str]) -> None:
    assert gpu_watch.spoiling(rounds) == reasons


# --- what NVML says


def test_state_is_what_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = training(
        FieldValues=field_values({74: 2**40 + 1, 75: 0}),
        CurrentClocksEventReasons=0x84,
        ComputeRunningProcesses=[SimpleNamespace(pid=4711)],
        ClockInfo=lambda kind: {pynvml.NVML_CLOCK_SM: 1980}[kind],
    )
    install(monkeypatch, [fake])
    state = read_state(fake)
    assert state == GpuState(
        monotonic_seconds=state.monotonic_seconds,
        violations_ns={"power cap": 2**40 + 1, "temperature": 0},
        reasons=frozenset({"power cap", "power brake"}),
        processes=frozenset({4711}),
        megahertz=1980,
    )


def test_counter_numbers_are_nvmls() -> None:
    names = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "RELIABILITY")
    assert list(gpu_watch.COUNTERS) == [getattr(pynvml, f"NVML_FI_DEV_PERF_POLICY_{name}") for name in names]


@pytest.mark.parametrize(
    ("bits", "reasons", "megahertz"),
    [
        (0x1 + 0x2 + 0x100, set(), None),  # idle, and clocks that someone set
        (0x4 + 0x10, {"power cap", "sync boost"}, 1980),
        (0x8 + 0x20 + 0x40, {"hardware slowdown", "temperature", "hardware's temperature limit"}, 1980),
        (refuses(), set(), None),
    ],
)
def test_chosen_clocks_are_not_throttled(
    monkeypatch: pytest.MonkeyPatch, bits: object, reasons: set[str], megahertz: int | None
) -> None:
    install(monkeypatch, [fake := training(CurrentClocksEventReasons=bits)])
    state = read_state(fake)
    assert (set(state.reasons), state.megahertz) == (reasons, megahertz)


# --- the watch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, deque[GpuState]]]:
    """The states that each GPU will report, by uuid; a test must use all of them."""
    script: dict[str, deque[GpuState]] = {}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: script[uuid])
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
    assert [note.text for note in watch.warnings()] == ["process 9 also used GPU 0 during 1 of 1 round"]
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
    lower = "GPU 0's clock was below 1980 MHz"
    assert [watch.look({1}, done) for done in (0, 1, 2, 2, 3)] == ["", "", lower, "", lower]
    assert [note.text for note in watch.warnings()] == [
        f"{lower} during 1 of 3 rounds",
        f"1 spoiled round was measured again: {lower}",
    ]
