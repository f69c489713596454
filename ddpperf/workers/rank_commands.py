"""The commands that a rank carries out for the controller process: build a measurement, and time it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpperf import specs
from ddpperf.collectives.calls import AllReduce, Collective, custom_collective
from ddpperf.collectives.single_calls import SingleCalls
from ddpperf.data.sampler import Sampling
from ddpperf.instruments import step_trace
from ddpperf.instruments.bucket_replay import BucketReplay
from ddpperf.instruments.counted_steps import CountedSteps
from ddpperf.instruments.kernels import digest, kernel_names
from ddpperf.instruments.memory_copy import Copy
from ddpperf.instruments.step_parts import PartedSteps, PartMarks
from ddpperf.instruments.traced_steps import TracedSteps
from ddpperf.measuring.clock import delayed, keep_busy, seconds_of, synchronize
from ddpperf.measuring.compile_and_capture import forbid_compiling, forget_compiled, require_none_new
from ddpperf.measuring.message_ledger import Ledger
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.measuring.trace_split import load_profiler
from ddpperf.specs import Spec, is_custom_model
from ddpperf.training.custom_step import CustomStep
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep, sent_bytes
from ddpperf.training.process_settings import process_settings, restore
from ddpperf.training.separate_replicas import SeparateReplicas
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import bucket_messages, gradient_bytes, own_messages
from ddpperf.training.whole_training import TrainingRun
from ddpperf.workers.channel import PROTOCOL, Message
from ddpperf.workers.gpu_pace import GpuPace

WARMUP_ITERATIONS = {"cpu": 2, "cuda": 10}
BUSY_SECONDS = 2e-3  # longer than a slow CPU takes to launch the graphs of a round of collective calls
KINDS: dict[type[Spec], Callable[..., Measurement]] = {
    specs.AllReduceSpec: AllReduce,
    specs.CollectiveSpec: Collective,
    specs.SingleCallsSpec: SingleCalls,
    specs.CopySpec: Copy,
    specs.SamplerSpec: Sampling,
    specs.CustomStepSpec: CustomStep,
    specs.CustomCollectiveSpec: custom_collective,
}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A measurement that a rank has built, and the function that runs its timed step.

    step: includes the delay of the measurement spec. training: None if the measurement does not
    train.
    """

    spec: Spec
    measurement: Measurement
    step: Callable[[], None]
    training: MeasuredStep | None = None

    def close(self) -> None:
        """Free memory and processes at once: a loader that waits for the garbage collector may hang."""
        held: list[object] = [self.measurement]
        if self.training is not None:
            held += [self.training, self.training.training]
        for part in held:
            vars(part).clear()


class Rank:
    """A rank's device, process group and open measurement, which last from one command to the next.

    Each public method is a command; its arguments and its answer are plain JSON values.
    report: called after each training step of a long command with the fraction that is done. folder: the
    private folder of the process set, in which ranks of one node meet to form process groups.
    """

    def __init__(
        self, rank: int, report: Callable[[float], None] = lambda fraction: None, folder: Path | None = None
    ) -> None:
        self.rank, self.report, self.folder = rank, report, folder
        self.device = torch.device("cpu")
        self.store: dist.TCPStore | None = None
        self.opened: Opened | None = None
        self.communicator_seconds = 0.0
        self.compiled_graphs = 0
        self.pace: GpuPace | None = None
        self.settings = process_settings()  # without those that a user's function changes
        self.settings_of: dict[tuple[str, ...], list[Any]] = {}  # as such functions left them

    @functools.cached_property
    def graph_stream(self) -> torch.cuda.Stream:
        """The CUDA stream in which this rank captures and replays all CUDA graphs.

        The default stream cannot be captured in a CUDA graph. On it, each NCCL call of a graph takes 4
        to 8 us longer. Replays in another stream than before make the process slow, and
        `GpuPace.restore` then takes 0.7 s (four H100s).
        """
        return torch.cuda.Stream(self.device)

    def setup(self, device: str, cores: list[list[int]] | None, address: str = "") -> Message:
        """Choose this rank's device, pin the rank to its CPU cores, and return library versions.

        address: where rank 0's TCP store listens, with which ranks of several nodes form process
        groups; empty on one node.
        """
        if cores is not None:  # first of all: only threads that start later inherit the cores
            os.sched_setaffinity(0, cores[self.rank])
        torch.set_num_threads(1)  # at every world size, or scaling would measure the thread pool
        if cuda := device == "cuda":
            self.device = torch.device(device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            self.pace = GpuPace(self.device)
        self.settings = process_settings()
        gc.freeze()  # the collector need not look at what the imports left
        port = self._start_store(address) if address and self.rank == 0 else None
        environment = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "nccl": loaded_nccl() if cuda else None,
            "nvls": os.environ.get("NCCL_NVLS_ENABLE") if cuda else None,
            "backend": "nccl" if cuda else "gloo",
            "threads": torch.get_num_threads(),
        }
        return {"port": port, "environment": environment, PROTOCOL: True}

    def _start_store(self, address: str) -> int:
        # A bound socket: no race for the port, and no other interface. Without it the store listens on all.
        listener = socket.create_server((address, 0), backlog=1024)
        port: int = listener.getsockname()[1]
        fd = listener.detach()
        self.store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
        return port

    def join(
        self, port: int | None, name: str, world_size: int, timeout_seconds: float, address: str = ""
    ) -> Message:
        """Form the torch process group `name` of ranks 0 to world_size-1.

        address, port: where rank 0's TCP store listens; empty on one node.
        """
        began = time.perf_counter()
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=self._store_of(name, world_size, address, port),
            rank=self.rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=self.device if cuda else None,
        )
        dist.barrier()  # the first use completes the communicator
        synchronize(self.device)
        self.communicator_seconds = time.perf_counter() - began
        return {}

    def _store_of(self, name: str, world_size: int, address: str, port: int | None) -> dist.Store:
        """Return the store with which the ranks of a group exchange their addresses."""
        if not address:  # a file: every local user could read and write the keys of a TCP store
            assert self.folder is not None
            return dist.FileStore(str(self.folder / name), world_size)
        if self.store is None:
            assert port is not None
            self.store = dist.TCPStore(address, port, None, False, wait_for_workers=False)
        return dist.PrefixStore(name, self.store)

    def leave(self) -> Message:
        """End torch's process group, together with the other ranks of the group."""
        self._drop_measurement()
        dist.barrier()
        synchronize(self.device)
        dist.destroy_process_group()
        return {}

    def open(self, spec: Message) -> Message:
        """Build the measurement that a measurement spec describes, and warm it up."""
        self._drop_measurement()
        described = specs.from_json(spec)
        if self.device.type == "cuda":
            default = torch.cuda.default_stream(self.device)
            torch.cuda.set_stream(self.graph_stream if described.captured else default)
        device = self._device_of(described)
        restore(self.settings_of.get(described.functions, self.settings))
        self.opened = open_measurement(described, rank=self.rank, device=device, report=self.report)
        measurement = self.opened.measurement
        measurement.start_round()
        measurement.warm_up(WARMUP_ITERATIONS[self.device.type])
        self.compiled_graphs = forbid_compiling()
        synchronize(self.device)
        if self.pace is not None and described.captured:
            self.pace.restore()
        return {"max_iterations": measurement.max_iterations}

    def sample(self, iterations: int, untimed: bool = True) -> Message:
        """Measure one round of `iterations` timed steps, and check their result.

        A barrier and an untimed step come first. A step that is a whole epoch or a whole training
        run has no untimed step before it. A CUDA graph of small collective calls can take less time
        than its launch, so the GPU spins until the graphs of the round are launched.

        untimed: False leaves the untimed step out, because this rank did the last round, too.
        """
        assert self.opened is not None
        spec, measurement, step = self.opened.spec, self.opened.measurement, self.opened.step
        if self.pace is not None and spec.captured and not spec.repeats:
            self.pace.restore()  # in an epoch or a training, new kernels may have been loaded
        measurement.start_round()
        synchronize(self.device)
        if spec.grouped:
            dist.barrier()
        if spec.calls > 1:
            # The GPUs meet in the untimed step, so all end their spin before the timed steps.
            keep_busy(BUSY_SECONDS)
        if untimed and spec.repeats:
            step()
        measurement.begin_timed()
        seconds = seconds_of(step, iterations, self._device_of(spec)) / spec.calls
        require_none_new(self.compiled_graphs)
        measurement.end_round((untimed and spec.repeats) + iterations)
        record = {"spec": spec.id, "iterations": iterations, "seconds": seconds, "ended": time.monotonic()}
        print(json.dumps(record))  # for the rank's log
        return {"seconds": seconds}

    def trace(self, steps: int, what: str, path: str = "") -> Message:
        """Run steps of the open measurement to find out why they got slower (`ddpperf.why`).

        what: "time" times the steps; "messages" counts what one step sends; "trace" and "stacks" trace
        the steps to the file `path`, after which comes the rank. "load", "keep" and "free" prepare the
        profiler and the memory, and run no step.
        """
        assert self.opened is not None
        spec, training = self.opened.spec, self.opened.training
        if what == "load":
            load_profiler(self.device)
        elif what in ("keep", "free"):
            step_trace.keep_memory(kept=what == "keep")
        if what in ("load", "keep", "free"):
            return {}
        self.opened.measurement.start_round()
        synchronize(self.device)
        if spec.grouped:
            dist.barrier()
        step, device = self.opened.step, self._device_of(spec)
        if training is not None and not spec.repeats:
            step = training.step  # of an epoch
        parts = training.training if training is not None else None
        if what == "messages":
            return {"messages": step_trace.messages_of(step, parts, captured=spec.captured)}
        if what == "time":
            return step_trace.timed(step, steps, device)
        file = Path(f"{path}-rank{self.rank}.json")
        problem = step_trace.traced(step, steps, device, file, parts, stacks=what == "stacks")
        return {"problem": problem, "file": str(file)}

    def finish(self) -> Message:
        """Check the measurement a last time, and return its counters.

        One process set is asked at a time, because some counters are times.
        """
        assert self.opened is not None
        spec = self.opened.spec
        counters: dict[str, float] = {}
        if self.pace is not None and spec.captured:
            counters["graph_slowdown"] = self.pace.slowdown()  # before other work runs
        counters |= self.opened.measurement.finish()
        if spec.grouped:
            counters["communicator_seconds"] = self.communicator_seconds
        return {"counters": counters}

    def close(self, kernels: bool = False) -> Message:
        """Free the measurement's memory; return a digest of a training step's kernels if asked, or ""."""
        assert self.opened is not None
        training, kernel_digest = self.opened.training, ""
        if kernels and training is not None:
            training.begin_epoch()  # the first step of an epoch always runs the same kernels
            kernel_digest = digest(kernel_names(training.step, self.device))
        self._drop_measurement()
        return {"kernels": kernel_digest}

    def exit(self) -> Message:
        """End torch's process group, if there is one, so that this process can exit."""
        if dist.is_initialized():
            self.leave()
        return {}

    def _device_of(self, spec: Spec) -> torch.device:
        """Return the device that a measured step works on, and whose clock times it."""
        return torch.device("cpu") if spec.on_cpu else self.device

    def _drop_measurement(self) -> None:
        if self.opened is None:
            return
        if functions := self.opened.spec.functions:
            self.settings_of[functions] = process_settings()
            restore(self.settings)
        self.opened.close()
        self.opened = None
        forget_compiled()
        gc.collect()  # frees reference cycles: a model's memory and a loader's processes
        gc.freeze()  # the next collection skips the objects of torch and its compiler
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that ever multiplied
            torch.cuda.empty_cache()


def loaded_nccl() -> str:
    """Return the version of the NCCL library in this process, such as 2.28.9.

    LD_PRELOAD can replace the library that torch was built with, which `torch.cuda.nccl.version` names.
    """
    number = ctypes.c_int()
    for library in (None, "libnccl.so.2"):  # what was loaded first; torch's dependency
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | (os.RTLD_NOLOAD if library else 0))
            loaded.ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ".".join(map(str, torch.cuda.nccl.version()))


def open_measurement(
    spec: Spec, *, rank: int, device: torch.device, report: Callable[[float], None]
) -> Opened:
    """Build the measurement that a measurement spec describes.

    report: called after each training step of a long step with the fraction that is done.
    """
    training: MeasuredStep | None = None
    measurement: Measurement
    if isinstance(spec, specs.EpochSpec | specs.RunSpec):
        # The delay is in every training step: a rank that is silent during a long delay counts as hung.
        delay = delayed(lambda: None, spec.delay_seconds, device)

        def after_step(done: float) -> None:
            delay()
            report(done)

        if isinstance(spec, specs.RunSpec):
            run = TrainingRun(spec, rank=rank, device=device, after_step=after_step)
            last_step = run.steps[spec.batch_sizes[-1]]
            return Opened(spec=spec, measurement=run, step=run.step, training=last_step)
        steps, training = _training(spec, rank, device)
        epoch = TrainingEpoch(training, steps=steps, after_step=after_step)
        return Opened(spec=spec, measurement=epoch, step=epoch.step, training=training)
    if isinstance(spec, specs.BucketReplaySpec):
        measurement = BucketReplay(spec, bucket_messages(spec, rank, device), rank=rank, device=device)
    elif isinstance(spec, specs.TrainingSpec):
        measurement, training = _training(spec, rank, device)
    else:
        measurement = KINDS[type(spec)](spec, rank=rank, device=device)
    step = delayed(measurement.step, spec.calls * spec.delay_seconds, device)
    return Opened(spec=spec, measurement=measurement, step=step, training=training)


def _training(spec: specs.TrainingSpec, rank: int, device: torch.device) -> tuple[Measurement, MeasuredStep]:
    """Build training steps, and the measurement that times, traces or counts them."""
    if isinstance(spec, specs.PartsSpec):
        marks = PartMarks(device)
        training = MeasuredStep(TrainingStep(spec, rank=rank, device=device, enter=marks.enter_part))
        return PartedSteps(training, marks), training
    if isinstance(spec, specs.MessagesSpec):
        with (ledger := Ledger()):
            step = TrainingStep(spec, rank=rank, device=device, enter=ledger.enter_part)
        training = MeasuredStep(step)
        sizes = {"parameter_bytes": float(gradient_bytes(step.module)), **sent_bytes(step)}
        own = own_messages(spec, rank, device) if spec.sync_batch_norm or is_custom_model(spec.model) else ()
        return CountedSteps(training, ledger, sizes, own), training
    is_separate = spec.strategy == "data_parallel" and spec.communication == "no_sync"
    kind = SeparateReplicas if is_separate else TrainingStep
    training = MeasuredStep(kind(spec, rank=rank, device=device))
    return (TracedSteps(training) if isinstance(spec, specs.TraceSpec) else training), training
