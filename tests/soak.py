"""Take measurements of all kinds on the CPU, and check that memory, files and threads do not grow.

    python -m tests.soak --count 1000 --seed 1

Base and candidate have one process set each. The ranks of the base live as long as the soak. A block
takes each kind of measurement once. Each block begins with the death of a rank of the candidate, and
the pool replaces the candidate's process set. So at the end of each block, the candidate's ranks
have the same age. The exit status is 1 if anything grew.

Only the first two blocks compile training steps, because torch never frees 0.3 to 0.8 MB of each
compiled step, even after torch._dynamo.reset(): see tests/ranks/test_soak.py.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.report.text import aligned
from ddpperf.specs import (
    FUNCTIONS_VARIABLE,
    OWN_ALGORITHMS,
    Algorithm,
    AllReduceSpec,
    BucketReplaySpec,
    CollectiveKind,
    CollectiveSpec,
    CopySpec,
    CustomCollectiveSpec,
    CustomStepSpec,
    EpochPartsSpec,
    EpochSpec,
    Fault,
    FaultCommand,
    MessagesSpec,
    OptimizerName,
    PartsSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    Strategy,
    TraceSpec,
    TrainingSpec,
    measured_as,
)
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.project import unmapped, wait_until

RANKS = 2
COMPILING_BLOCKS = 2
DEADLINE_SECONDS = 120.0
MEMORY_GROWTH = 0.01
# The open files and threads of a gloo process group. With FSDP, torch may keep one ended process group, but
# never two: see tests/ranks/test_soak.py.
GROUP = 5, 3
BASE, CANDIDATE = "A", "B"
CONTROLLER = "the controller"
SMALL = AllReduceSpec(world_size=2, nbytes=1024)
MODEL, STEP, TRIMMED_STEP, SUM = FUNCTIONS = [
    f"tests.soak:{name}" for name in ("perceptron", "step", "trimmed_step", "all_reduce")
]
TRIM = CustomStepSpec(world_size=2, per_rank_batch_size=4, function=TRIMMED_STEP)
FAULT_COMMANDS: tuple[FaultCommand, ...] = get_args(FaultCommand)


# --- what the ranks import


def perceptron() -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Return a small custom model."""
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    return module, lambda size: (torch.randn(size, 32), torch.randn(size, 8)), nn.functional.mse_loss


def step(*, rank: int, world_size: int, batch_size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a custom training step, which averages gradients itself."""
    del rank
    module = nn.Linear(16, 4).to(device)

    def train() -> Tensor:
        loss: Tensor = module(torch.ones(batch_size, 16, device=device)).square().mean()
        module.zero_grad()
        loss.backward()
        for parameter in module.parameters():
            if world_size > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        return loss.detach()

    return train


def trimmed_step(**arguments: Any) -> Callable[[], Tensor]:
    """Return a custom training step, after all free memory has gone back to the kernel.

    What malloc keeps for its next calls differs by some MB from measurement to measurement.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return step(**arguments)


def all_reduce(buffer: Tensor) -> None:
    """Sum a buffer over all ranks."""
    dist.all_reduce(buffer)


# --- what is measured


def kinds() -> list[Spec]:
    """Return a measurement of each kind that the CPU has, with little work."""
    return [*trainings(), *instruments(), *epochs(), *collectives()]


def trainings() -> Iterator[TrainingSpec]:
    """Yield training steps by each strategy, hook, precision and execution."""
    single = TrainingSpec(world_size=1, per_rank_batch_size=4, strategy="single", model=MODEL)
    images = dataclasses.replace(single, model="resnet10_cifar")
    ddp = dataclasses.replace(single, world_size=2, strategy="ddp")
    yield single
    yield ddp
    yield dataclasses.replace(ddp, world_size=1)
    for strategy in ("own_ddp", "zero1", "fsdp"):
        yield dataclasses.replace(ddp, strategy=strategy)
    for options in (
        {"precision": "bf16", "comm_hook": "bf16", "comm_delay_seconds": 0.001},
        {"precision": "fp16", "comm_hook": "fp16"},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"buffer_sync": False, "accumulation_steps": 2},
        {"communication": "local", "buffer_sync": False},
        {"communication": "no_sync", "buffer_sync": False},
        {"execution": "compile"},
    ):
        yield dataclasses.replace(ddp, **options)
    yield dataclasses.replace(images, memory_format="channels_last")
    yield dataclasses.replace(images, world_size=2, strategy="ddp", input="device", epoch_images=8)


def instruments() -> Iterator[Spec]:
    """Yield what is measured of a training step beside its seconds."""
    ddp = TrainingSpec(world_size=2, per_rank_batch_size=4, strategy="ddp", model=MODEL)
    strategies: tuple[Strategy, ...] = ("ddp", "own_ddp", "zero1", "fsdp")
    for strategy in strategies:
        of = dataclasses.replace(ddp, strategy=strategy)
        yield measured_as(TraceSpec, of)
        yield measured_as(MessagesSpec, of)
    yield measured_as(PartsSpec, ddp)
    yield measured_as(PartsSpec, dataclasses.replace(ddp, world_size=1, strategy="single"))
    yield measured_as(BucketReplaySpec, ddp)


def epochs() -> Iterator[Spec]:
    """Yield whole epochs and whole trainings."""
    size: dict[str, Any] = {"model": "resnet10_cifar", "per_rank_batch_size": 4, "epoch_images": 16}
    ddp: dict[str, Any] = {**size, "world_size": 2, "strategy": "ddp"}
    single: dict[str, Any] = {**size, "world_size": 1, "strategy": "single"}
    loaded: dict[str, Any] = {"input": "dataloader", "loader_workers": 1}
    yield EpochSpec(**single, input="device")
    yield EpochSpec(**ddp, input="dataloader")
    yield EpochSpec(**ddp, **loaded)
    yield EpochPartsSpec(**ddp, **loaded)
    run: dict[str, Any] = {"input": "device", "epochs": 1, "test_images": 8, "rate": 0.01}
    yield RunSpec(**single, **run, label_smoothing=0.1, average_weights=True)
    for optimizer in get_args(OptimizerName):
        yield RunSpec(**ddp, **run, optimizer=optimizer)


def collectives() -> Iterator[Spec]:
    """Yield calls of each collective and algorithm, the sampler, a copy, and a user's functions."""
    algorithms: tuple[Algorithm, ...] = ("backend", *OWN_ALGORITHMS)
    for algorithm in algorithms:
        yield AllReduceSpec(world_size=2, nbytes=2**16, algorithm=algorithm)
    for kind in get_args(CollectiveKind):
        yield CollectiveSpec(world_size=2, nbytes=2**16, kind=kind)
    yield SamplerSpec(world_size=2, epoch_images=1000)
    yield CopySpec(world_size=1, nbytes=2**20)
    yield CustomStepSpec(world_size=1, per_rank_batch_size=4, function=STEP)
    yield CustomStepSpec(world_size=2, per_rank_batch_size=4, function=STEP)
    yield CustomCollectiveSpec(world_size=2, nbytes=2**16, function=SUM)


def blocks(kinds: Sequence[Spec], seed: int) -> Iterator[list[Spec]]:
    """Yield all kinds in random order, again and again, with three process groups in each block."""
    choice = random.Random(seed)
    while True:
        by_size: dict[int, list[Spec]] = {0: [], 1: [], 2: []}
        for spec in choice.sample(kinds, len(kinds)):
            by_size[spec.world_size if spec.grouped else 0].append(spec)
        alone, one, two = by_size.values()
        between, last = choice.sample([alone, one], 2)
        half = len(two) // 2
        yield [*two[:half], *between, *two[half:], *last]


# --- what is in use


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The memory, open files and threads of a process.

    nbytes: the memory that no other process shares (USS). The ranks share the pages of libraries, so
    the resident memory (RSS) of a rank also depends on other processes.
    """

    nbytes: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Return what a process uses now."""
        process = psutil.Process(pid)
        memory = process.memory_full_info().uss
        return cls(nbytes=memory, files=process.num_fds(), threads=process.num_threads())


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is in use after a block of measurements.

    count: the measurements so far. groups: the process groups that the base's ranks have formed so
    far. replaced: the process sets that have been replaced so far. seconds: since the start.
    controller, base, candidate: the controller process, and the ranks of both process sets. stored:
    the number of files in the private folders of both process sets, with those in which ranks meet.
    shared: the files in /dev/shm that no process uses, beyond those before the soak.
    """

    count: int
    groups: int
    replaced: int
    seconds: float
    controller: Usage
    base: Sequence[Usage]
    candidate: Sequence[Usage]
    stored: Sequence[int]
    shared: int

    def processes(self) -> dict[str, Usage]:
        """Return the usage of each process, by its name in messages."""
        ranks = {
            f"rank {rank} of the {side}": usage
            for side, usages in (("base", self.base), ("candidate", self.candidate))
            for rank, usage in enumerate(usages)
        }
        return {CONTROLLER: self.controller, **ranks}


def problems(first: Row, last: Row, memory_growth: float) -> Iterator[str]:
    """Yield a sentence for all that grew from one row to a later row.

    memory_growth: the fraction by which the memory of a process may grow.
    """
    before = first.processes()
    for name, now in last.processes().items():
        growth = now.nbytes / before[name].nbytes - 1
        if growth > memory_growth:
            yield f"the memory of {name} grew by {growth:.1%}, at most {memory_growth:.0%} is allowed"
        grew = now.files - before[name].files, now.threads - before[name].threads
        keeps_group = name != CONTROLLER and grew == GROUP
        for what, count, earlier in (
            ("open files", now.files, before[name].files),
            ("threads", now.threads, before[name].threads),
        ):
            if count > earlier and not keeps_group:
                yield f"{name} has {count} {what}, it had {earlier}"
    for what, counts, allowed in (
        ("files in a private folder", last.stored, max(first.stored)),
        ("files in /dev/shm that no process uses", [last.shared], first.shared),
    ):
        if max(counts) > allowed:
            yield f"there are {max(counts)} {what}, there were {allowed}"


def grown(rows: Sequence[Row], memory_growth: float) -> Iterator[str]:
    """Yield a sentence for all that grew after the blocks that compile.

    The candidate's ranks of later blocks are without torch's compiler. It would hide their growth.
    """
    yield from problems(rows[min(COMPILING_BLOCKS, len(rows) - 1)], rows[-1], memory_growth)


def table(rows: Sequence[Row]) -> str:
    """Return a text table of rows."""
    heading = ("count", "groups", "replaced", "seconds", "controller MB", "base MB", "candidate MB")
    lines: list[tuple[str, ...]] = [(*heading, "files", "threads", "stored", "shm")]
    for row in rows:
        uses = row.processes().values()
        line = (
            row.count,
            row.groups,
            row.replaced,
            f"{row.seconds:.0f}",
            _megabytes(row.controller),
            _megabytes(*row.base),
            _megabytes(*row.candidate),
            " ".join(str(usage.files) for usage in uses),
            " ".join(str(usage.threads) for usage in uses),
            " ".join(map(str, row.stored)),
            row.shared,
        )
        lines.append(tuple(map(str, line)))
    return "\n".join(aligned(lines, figures=range(len(lines[0]))))


def _megabytes(*usages: Usage) -> str:
    return " ".join(f"{usage.nbytes / 1e6:.2f}" for usage in usages)


class Soak:
    """A pool with two process sets, and what has been measured on it."""

    def __init__(self, specs: Iterable[Spec], seed: int, compiled: str) -> None:
        environment = {
            FUNCTIONS_VARIABLE: ",".join(FUNCTIONS),
            # Memory in pages of 4 KiB: a page of 2 MiB is half a percent of a rank's memory.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
            "TORCHINDUCTOR_CACHE_DIR": compiled,  # a new process set need not compile all again
        }
        sides = [Side(name=name, environment=environment) for name in (BASE, CANDIDATE)]
        options = SetOptions(size=RANKS, device="cpu", rounds=1, deadline_seconds=DEADLINE_SECONDS)
        one_step_a_round = dict.fromkeys([*specs, SMALL, TRIM], 1.0)
        self.pool = Pool(options, sides=sides, step_seconds=one_step_a_round)
        self._choice = random.Random(seed)
        self._began = time.monotonic()
        self._shared = unmapped(set(os.listdir(SHARED_MEMORY)))
        self._count = self._groups = self._replaced = 0
        self._size = 0  # of the base's process group

    def run(self, specs: Iterable[Spec]) -> Row:
        """Kill a rank of the candidate, then measure each spec."""
        self._kill()
        for spec in specs:
            self.pool.measure(spec)
            self._count += 1
            self._count_group(spec)
        self.pool.measure(TRIM)
        self._count_group(TRIM)
        return self._row()

    def _count_group(self, spec: Spec) -> None:
        size = spec.world_size if spec.grouped else 0
        self._groups += size not in (0, self._size)
        self._size = size

    def _kill(self) -> None:
        """Kill a random rank of the candidate, while it is idle or at a random command."""
        moment, rank = self._choice.choice((None, *FAULT_COMMANDS)), self._choice.randrange(RANKS)
        candidate = self.pool.live_sets()[1]
        if moment is None:
            os.kill(candidate.pids[rank], signal.SIGKILL)
        else:
            fault = Fault(kind="kill", rank=rank, command=moment)
            with pytest.raises(SetFailure, match=rf"rank {rank} of set \w+ was killed by SIGKILL"):
                self.pool.measure(SMALL, dataclasses.replace(SMALL, fault=fault))
            self._count_group(SMALL)
        wait_until(candidate.dead_ranks, DEADLINE_SECONDS, lambda: f"no rank died at {moment}")
        self.pool.live_sets()
        assert not candidate.alive, "the process set was not replaced"
        self._replaced += 1

    def _row(self) -> Row:
        base, candidate = self.pool.live_sets()
        return Row(
            count=self._count,
            groups=self._groups,
            replaced=self._replaced,
            seconds=time.monotonic() - self._began,
            controller=Usage.of(os.getpid()),
            base=[Usage.of(pid) for pid in base.pids.values()],
            candidate=[Usage.of(pid) for pid in candidate.pids.values()],
            stored=[stored_files(base), stored_files(candidate)],
            shared=len(unmapped(set(os.listdir(SHARED_MEMORY))) - self._shared),
        )


def stored_files(live: ProcessSet) -> int:
    """Return the number of files in the private folder of a process set."""
    return sum(path.is_file() for path in live._folder.path.rglob("*"))


def soak(specs: Sequence[Spec], count: int, seed: int) -> list[Row]:
    """Take at least `count` measurements, and return what was in use after each block of them."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as compiled:
        run = Soak(specs, seed, compiled)
        with run.pool:
            for number, block in enumerate(blocks(specs, seed)):
                compiles = number < COMPILING_BLOCKS
                rows.append(run.run(spec for spec in block if compiles or not spec.compiled))
                print(f"{rows[-1].count} of {count} measurements", file=sys.stderr)
                if rows[-1].count >= count:
                    break
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, and print a table of every second block and what grew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="take at least this many measurements; default 1000"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the order and the faults; default 1")
    options = parser.parse_args(arguments)
    rows = soak(kinds(), options.count, options.seed)
    print(table(rows[1::2]))
    found = list(grown(rows, MEMORY_GROWTH))
    print("\n".join(found) or "nothing grew")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
