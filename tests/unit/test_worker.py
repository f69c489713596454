"""What a rank prints when a command takes too long."""

from __future__ import annotations

import time

import pytest

from ddpperf.workers import worker
from ddpperf.workers.failures import COLLECTIVE
from ddpperf.workers.worker import Watchdog


def test_late_command_prints_stacks_and_collective(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version's record of torch may lack a field; the last line comes all the same."""

    def other_form() -> dict[str, object]:
        raise KeyError("pg_id")

    monkeypatch.setattr(worker, "pending_collective", other_form)
    watchdog = Watchdog(0.1)
    watchdog.begin()
    time.sleep(0.5)
    watchdog.end()
    watchdog.begin()
    watchdog.end()  # in time: prints nothing more
    time.sleep(0.3)
    printed = capfd.readouterr().err
    assert printed.count("Timeout (0:00:00") == 1
    assert "in test_late_command_prints_stacks_and_collective" in printed
    assert printed.endswith(f"\n{COLLECTIVE}{{}}\n")
