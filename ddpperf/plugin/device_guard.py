"""Locking and watching of the GPUs or the CPU, and pinning of ranks to CPU cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

from ddpperf.machine.cores import Pinning
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.gpu_description import Gpu, gpu_handles
from ddpperf.machine.gpu_watch import GpuWatch
from ddpperf.machine.utilization import Recorder, Sampler
from ddpperf.results.outcomes import Note, warning
from ddpperf.specs import Spec, TrainingSpec


class Devices:
    """The GPUs of a test run, or the CPU if there are no GPUs.

    In a run on several nodes these are the devices of the controller's node only.

    cores: the CPU cores that this process may use while it is not pinned.
    gpus: all GPUs that the run may use; empty on the CPU.
    world_size: the usual number of ranks on this node. several_nodes: whether larger world sizes have
    ranks on other nodes. On one CPU, they have larger process sets.
    """

    def __init__(self, gpus: Sequence[Gpu], world_size: int, *, several_nodes: bool = False) -> None:
        self._gpus = gpus[:world_size]
        self._world_size, self._several_nodes = world_size, several_nodes
        self.cores = sorted(os.sched_getaffinity(0))  # before this process is pinned to some of them

    def acquire(self, cleanup: ExitStack) -> None:
        """Lock the GPUs or the CPU, and start watching the GPUs.

        Raises Refused if another test run uses one of them. cleanup: unlocks them, and lets this process
        use all CPU cores again, when it is closed.
        """
        cleanup.enter_context(lock_devices([gpu.uuid for gpu in self._gpus] or ["cpu"]))
        cleanup.callback(self.pinning.release)
        _ = self._watch  # from now on, processes on the GPUs that are not ranks count as foreign

    @cached_property
    def pinning(self) -> Pinning:
        return Pinning(self._world_size, self._gpus)

    def check_round(self, processes: list[int], done: int) -> str:
        """Return what disturbed the GPUs in a timed round, and move this process off the ranks' cores.

        processes: ids of the run's own processes. done: number of rounds measured before this round.
        """
        self.pinning.hold()
        return self._watch.look(processes, done)

    def recorder(self, spec: Spec, processes: list[int], alone: bool) -> Recorder:
        """Return the recorder of the devices' energy and utilization for the measurement of a spec.

        Only epochs and whole trainings are sampled over time, because a sample takes about as long as
        a short step. Nothing is recorded of a spec with ranks on other nodes, because this node's
        joules are not those of all ranks. processes: ids of the ranks. alone: whether one process set
        measures.
        """
        crosses_nodes = self._several_nodes and spec.world_size > self._world_size
        if not isinstance(spec, TrainingSpec) or crosses_nodes:
            return Recorder()
        handles, sampler = self._watch.handles[: spec.world_size], None
        if not spec.repeats:
            with_children = spec.loader_workers > 0
            sampler = Sampler(handles, self.cores, processes, with_children=with_children)
        return Recorder(handles, sampler, alone=alone)

    @cached_property
    def _watch(self) -> GpuWatch:
        return GpuWatch(gpu_handles(self._gpus))

    def warnings(self, spec: Spec) -> list[Note]:
        """Return warnings about what disturbed this node's devices in the measurement that just ended."""
        most_ranks = self._world_size if self._several_nodes else None
        return [*map(warning, self.pinning.warnings(spec, most_ranks)), *self._watch.warnings()]
