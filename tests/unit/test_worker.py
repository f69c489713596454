"""What a rank prints when a command takes too long, or when the rank cannot begin."""

from __future__ import annotations

import sys
import time
from multiprocessing import Pipe
from pathlib import Path

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


def test_rank_that_cannot_import_torch_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit on memory. Otherwise the rank would print a traceback of ddpperf, or wait."""
    monkeypatch.setitem(sys.modules, "ddpperf.workers.rank_commands", None)
    with pytest.raises(SystemExit, match=r"^torch cannot be imported \(.*\); try python -c"):
        worker._serve(Pipe()[0], 0, Path())
