"""Disturbances of rounds, from states as the driver reports them; no GPU is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.machine import gpu_watch
from ddpperf.machine.gpu_watch import GpuState, GpuWatch, foreign, read_state, throttled
from tests.fake_nvml import field_values, install, refuses, training


def state(
    at: float, held_ns: int | None = None, reasons: Collection[str] = (), processes: Collection[int] = ()
) -> GpuState:
    return GpuState(
        monotonic_seconds=at,
        violations_ns={} if held_ns is None else {"power cap": held_ns},
        reasons=frozenset(reasons),
        processes=frozenset(processes),
    )


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (state(7.0, 5_000), state(8.0, 10_005_000), set()),  # 1 % of the time
        (state(7.0, 5_000), state(8.0, 10_005_001), {"power cap"}),
        (state(7.0, 5_000), state(8.0, 0), set()),  # the driver started again
        (state(7.0, 0), state(8.0, 0, ["power cap"]), set()),  # the counter saw the whole time
        (state(7.0, 0), state(8.0, 0, ["power brake"]), {"power brake"}),  # nothing counts it
        (state(7.0, reasons=["power cap"]), state(8.0), set()),
    ],
)
def test_counters_decide_before_momentary_reasons(before: GpuState, now: GpuState, why: set[str]) -> None:
    assert throttled(before, now) == why


@pytest.mark.parametrize(
    ("listed", "own", "before", "others"),
    [
        ({1, 2, 3}, {1, 2}, set(), {3}),
        ({501, 502, 503}, {1, 2}, {503}, {503}),  # the host's process ids: two of these may be ours
        ({501}, {1, 2}, {503}, set()),  # it was there before, and has ended
    ],
)
def test_process_is_foreign_if_it_cannot_be_ours(
    listed: set[int], own: set[int], before: set[int], others: set[int]
) -> None:
    assert foreign(listed, own, before) == others


def test_state_is_what_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    power, heat = pynvml.NVML_FI_DEV_PERF_POLICY_POWER, pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL
    fake = training(
        FieldValues=field_values({power: 2**40 + 1, heat: 0}),
        CurrentClocksEventReasons=0x84,
        ComputeRunningProcesses=[SimpleNamespace(pid=4711)],
    )
    install(monkeypatch, [fake])
    found = read_state(fake)
    assert found == GpuState(
        monotonic_seconds=found.monotonic_seconds,
        violations_ns={"power cap": 2**40 + 1, "temperature": 0},
        reasons=frozenset({"power cap", "power brake"}),
        processes=frozenset({4711}),
        megahertz=1980,
    )


@pytest.mark.parametrize(
    ("bits", "reasons", "megahertz"),
    [
        (0x1 + 0x2 + 0x100, set(), None),  # idle, and clocks that someone set
        (refuses, set(), None),
    ],
)
def test_chosen_clocks_are_not_throttled(
    monkeypatch: pytest.MonkeyPatch, bits: object, reasons: set[str], megahertz: int | None
) -> None:
    install(monkeypatch, [fake := training(CurrentClocksEventReasons=bits)])
    found = read_state(fake)
    assert (set(found.reasons), found.megahertz) == (reasons, megahertz)


def watch_of(monkeypatch: pytest.MonkeyPatch, *states: GpuState) -> GpuWatch:
    """Return the watch of a GPU that reports these states, and of an undisturbed one before it."""
    of_second = deque(states)
    monkeypatch.setattr(gpu_watch, "read_state", lambda gpu: of_second.popleft() if gpu else state(0))
    return GpuWatch([0, 1])


def texts(watch: GpuWatch) -> list[str]:
    return [note.text for note in watch.warnings()]


def test_rounds_are_forgotten_after_their_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state(at, held * 10**9) for at, held in enumerate((6, 7, 8, 8, 8, 8, 9))]  # 7 before all rounds
    watch = watch_of(monkeypatch, *states)
    assert [watch.look({1}, done) for done in range(4)] == [""] * 4
    assert texts(watch) == ["GPU 1 was throttled (power cap) during 1 of 3 rounds"]
    assert texts(watch) == []
    assert [watch.look({1}, done) for done in range(2)] == [""] * 2
    assert texts(watch) == ["GPU 1 was throttled (power cap) during 1 of 1 round"]


def test_earlier_processes_are_foreign_and_ended_ranks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [9], [9, 501], [1, 2], [1, 3, 2], [3, 8], [3]
    watch = watch_of(monkeypatch, *(state(at, processes=listed) for at, listed in enumerate(lists)))
    assert watch.look({1}, 1) == "process 9 also used GPU 1", "perhaps one of ours is listed as 501"
    assert texts(watch) == ["process 9 also used GPU 1 during 1 of 1 round"]
    assert watch.look({1, 2}, 1) == ""
    assert watch.look({1, 3}, 2) == "", "rank 2 was replaced and is still listed"
    assert watch.look({3}, 3) == "process 8 also used GPU 1"
    watch.look({3}, 0)
    assert texts(watch) == [], "that was another measurement"


HOT, CAPPED = ({"reasons": frozenset({why})} for why in ("temperature", "power cap"))
SHARED = {"processes": frozenset({1, 64, 12})}
FULL, NEAR, LOW = ({"megahertz": each} for each in (1980, 1941, 1940))  # 1940.4 is 2% below 1980


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        ([HOT, HOT], "GPU 1 was throttled (temperature)"),  # the work's own it never is
        ([{}, CAPPED], ""),
        ([{}, {}, CAPPED], "GPU 1 was throttled (power cap)"),
        ([{}, SHARED], "processes 12, 64 also used GPU 1"),
        ([FULL, NEAR], ""),
        ([LOW, FULL], ""),  # the round before was the slower one
        ([FULL, {}, LOW], "GPU 1's clock was below 1980 MHz"),
        ([FULL | CAPPED, LOW], ""),  # by the work's own cap
        ([FULL, LOW | HOT], "GPU 1 was throttled (temperature)"),
    ],
)
def test_frequent_power_cap_does_not_spoil(
    monkeypatch: pytest.MonkeyPatch, rounds: list[dict[str, Any]], reason: str
) -> None:
    watch = watch_of(monkeypatch, state(0), *(replace(state(at), **one) for at, one in enumerate(rounds, 1)))
    assert [watch.look({1, 2}, done) for done in range(1, 1 + len(rounds))][-1] == reason


def test_changed_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reports no reason for the lower clock."""
    clocks = (345, 345, 1980, 1200, 1980, 1200)
    watch = watch_of(monkeypatch, *(replace(state(at), megahertz=each) for at, each in enumerate(clocks)))
    lower = "GPU 1's clock was below 1980 MHz"
    assert [watch.look({1}, done) for done in (0, 1, 2, 2, 3)] == ["", "", lower, "", lower]
    again = f"1 spoiled round was measured again: {lower}"
    assert texts(watch) == [f"{lower} during 1 of 3 rounds", again]
