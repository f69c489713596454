"""Let a test know each command that a pool's process sets send to their ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ddpperf.workers import pool as pools
from ddpperf.workers.process_set import ProcessSet


@contextlib.contextmanager
def watched_commands(report: Callable[[str, ProcessSet], None]) -> Iterator[None]:
    """Call `report` with "start" and with each command, just before the ranks get it."""

    class Watched(ProcessSet):
        def spawn(self) -> None:
            report("start", self)
            super().spawn()

        def ask(self, command: str, **arguments: Any) -> None:
            report(command, self)
            super().ask(command, **arguments)

    with mock.patch.object(pools, "ProcessSet", Watched):
        yield
