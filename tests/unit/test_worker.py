"""What a rank prints when it is asked for its collectives."""

from __future__ import annotations

import os

import pytest

from ddpperf.workers import worker
from ddpperf.workers.hangs import COLLECTIVES


def test_unknown_record_of_torch_still_ends_the_report(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version's record may lack a field; the controller waits for the report's last line."""

    def other_form() -> dict[str, object]:
        raise KeyError("pg_id")

    monkeypatch.setattr(worker, "collectives", other_form)
    requests, wake = os.pipe()
    os.write(wake, bytes([worker.STACKS_SIGNAL] * 2))
    os.close(wake)
    worker._print_collectives(requests)
    os.close(requests)
    assert capfd.readouterr().err == f"\n{COLLECTIVES}{{}}\n" * 2
