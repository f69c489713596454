"""The devices of a run: locked against other runs, watched, and their cores given to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpperf.machine.cores import Pinning
from ddpperf.machine.device_lock import DeviceLock
from ddpperf.machine.gpu_watch import GpuWatch
from ddpperf.machine.hardware import Gpu
from ddpperf.results.notes import Note, warning
from ddpperf.specs import Spec


class Devices:
    """The GPUs of a run, or the CPU where there are none, from its first test to its end."""

    def __init__(self, gpus: Sequence[Gpu], world_size: int) -> None:
        """gpus: all that the run may use, none on the CPU.

        world_size: the most ranks of the run.
        """
        self._gpus = gpus[:world_size]
        self._world_size = world_size
        self._lock = DeviceLock()
        self._pinning = Pinning()
        self._watch: GpuWatch | None = None

    def acquire(self) -> None:
        """Lock the devices and watch the GPUs. Raises Refused if another run uses one of them."""
        uuids = [gpu.uuid for gpu in self._gpus]
        self._lock.acquire(uuids or ["cpu"])
        if uuids:
            self._watch = GpuWatch(uuids)

    def cores(self) -> Sequence[Sequence[int]] | None:
        """Return the cores of each rank; None where ranks are not pinned."""
        self._pinning.plan(self._world_size, self._gpus)
        return self._pinning.ranks

    def check_round(self, processes: list[int], done: int) -> str:
        """Check after a round what disturbed the GPUs, and keep this process off the ranks' cores.

        processes: ids of the run's own processes. done: how many rounds were measured before.
        Returns what spoiled the round; empty if nothing did.
        """
        self._pinning.hold()
        return self._watch.look(processes, done) if self._watch is not None else ""

    def warnings(self, spec: Spec) -> list[Note]:
        """Return what disturbed the measurement that just ended."""
        disturbed = self._watch.warnings() if self._watch is not None else []
        return [*map(warning, self._pinning.warnings(spec)), *disturbed]

    def environment(self) -> dict[str, Any]:
        """Return the pinning, as it is stored with the run."""
        return self._pinning.environment()

    def release(self) -> None:
        """Let other runs use the devices, and this process all cores."""
        self._pinning.release()
        self._lock.release()
