"""Marks the ends of training steps inside the processes of a script, and writes their times to a file.

The module is loaded by its path, before the script, and imports only the standard library. torch's
optimizers then call a function after each step. In the candidate of an A/B run, it delays some early
steps, which are not measured. The times of a process are written when the last step has ended, or when
the process ends.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

VARIABLE = "DDPPERF_SCRIPT"  # JSON with what `Marks` reads
ENOUGH = "enough"  # a file that ends the measured steps
BEAT_SECONDS = 0.2  # a process shows that its steps go on by touching a file
# The control steps after the warm-up: usual ones, and those with a delay. Each half is balanced.
CONTROL = "UDDUDUUDDUUDUDDU"
LEAST_STEPS = 10  # are measured, however long they take
MOST_STEPS = 20_000
MEMORY_STEPS = 10  # after so many steps the peak memory is read
FEWEST_TRACED, MOST_TRACED, STACKS = 4, 16, 1  # steps in the two traces, besides a first step
OPTIMIZERS = "torch.optim.optimizer"
MOST_LETTERS = 200


class Marks:
    """The ends of the steps of one process.

    The fields are read from JSON. folder: for the files. began: the time.monotonic() value at which the
    run began. first: the first step after the warm-up. control: of the next steps, those marked in CONTROL
    are delayed by this fraction of a step. The steps after them are measured. steps: how many, or 0 to
    measure until there is a file ENOUGH. delay: seconds by which each step is delayed. marks: the names
    of a step and of a part in a trace, and the bytes of the copy that marks a step there; if not
    empty, some steps after the measured ones are traced.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.folder, self.began, self.first = Path(fields["folder"]), fields["began"], fields["first"]
        steps: int = fields["steps"]
        self.most, self.least = (steps, steps) if steps else (MOST_STEPS, LEAST_STEPS)
        self.control, self.delay, self.marks = fields["control"], fields["delay"], fields["marks"]
        self.explicit = False  # whether the script marks its steps itself
        self._forget()

    def _forget(self) -> None:
        self.process = os.getpid()
        self.ends: list[Any] = []  # of steps: times, or events of a GPU
        self.first_step_seconds = 0.0
        self.rank = int(os.environ.get("RANK", 0))
        self.device: Any = None  # the GPU that trains
        self.memory: list[int] = []  # its peak, after each MEMORY_STEPS measured steps
        self.stepped: set[int] = set()  # the optimizers that have stepped since the last mark
        self.beaten, self.enough, self.written, self.problem = 0.0, False, False, ""
        self.trace: Iterator[None] | None = None
        self.control_delay = 0.0
        self.waits: dict[float, Callable[[], None]] = {}

    def optimizer_stepped(self, optimizer: object, *_: object) -> None:
        """Called by torch after each step of any optimizer."""
        if self.explicit or self.written:
            return
        if self.stepped and id(optimizer) not in self.stepped:
            self.stepped.add(id(optimizer))
            return
        self.stepped = {id(optimizer)}
        self.mark()

    def step(self) -> None:
        """Called by `ddpperf.step()`: from now on, only these calls end steps."""
        if not self.explicit:
            self._forget()
            self.explicit = True
        if not self.written:
            self.mark()

    def mark(self) -> None:
        """End a step."""
        if self.process != os.getpid():  # in a fork
            self._forget()
        torch = sys.modules.get("torch")
        cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        if cuda is not None and cuda.is_current_stream_capturing():
            return  # the steps of a CUDA graph are its replays
        step = len(self.ends) - self.first  # that ends now, after the warm-up
        if not self.ends:
            self._begin(torch)
        in_control = 0 <= step < len(CONTROL)
        if delay := self.delay + (self.control_delay if in_control and CONTROL[step] == "D" else 0.0):
            self._wait(delay)
        now = time.perf_counter()
        if now - self.beaten > BEAT_SECONDS:
            self.beaten = now
            (self.folder / f"beat-{self.process}").touch()
            self.enough = (self.folder / ENOUGH).exists()
        if self.trace is not None:
            self._trace_next()
            return
        if self.device is not None:
            self.ends.append(cuda.Event(enable_timing=True))  # type: ignore[union-attr]
            self.ends[-1].record(cuda.current_stream(self.device))  # type: ignore[union-attr]
        else:
            self.ends.append(now)
        taken = step + 1 - len(CONTROL)
        if step == 0:
            self.control_delay = self.control * median(self._seconds()[self.first // 2 :])
        elif taken == 0:
            (self.folder / f"ready-{self.process}").touch()
        elif taken > 0 and taken % MEMORY_STEPS == 0 and self.device is not None:
            self.memory.append(cuda.max_memory_allocated(self.device))  # type: ignore[union-attr]
        if taken >= self.most or (taken >= self.least and self.enough):
            steps = min(MOST_TRACED, max(FEWEST_TRACED, self.most // 10))  # the same on all ranks
            self.trace = traced(self.folder, self.device, self.marks, steps) if self.marks else iter(())
            self._trace_next()

    def _begin(self, torch: Any) -> None:
        """The first step has ended: look what trains, and see to it that the process writes at its end."""
        self.first_step_seconds = time.monotonic() - self.began
        if torch is not None and torch.cuda.is_initialized():
            # The current device need not be the one that trains
            self.device = max(range(torch.cuda.device_count()), key=torch.cuda.max_memory_allocated)
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        if multiprocessing.parent_process() is None:
            atexit.register(self.ended)
        else:  # such a process ends without what atexit has registered
            multiprocessing.util.Finalize(None, self.ended, exitpriority=0)

    def _trace_next(self) -> None:
        """Begin the next traced step; after the last one, write what was measured."""
        try:
            next(self.trace)  # type: ignore[arg-type]
        except StopIteration:
            self.write()
        except Exception as error:
            self.problem = f"torch's profiler fails ({type(error).__name__}: {error})"[:MOST_LETTERS]
            self.write()

    def _seconds(self) -> list[float]:
        """Return the seconds of each step but step 0."""
        if self.device is not None:
            self.ends[-1].synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self.ends)]
        return [after - before for before, after in pairwise(self.ends)]

    def _wait(self, seconds: float) -> None:
        """Let the device and this process wait."""
        if self.device is None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return
        torch = sys.modules["torch"]
        with torch.cuda.device(self.device):
            if seconds not in self.waits:
                clock = _load("../measuring/clock.py")
                device = torch.device("cuda", self.device)
                self.waits[seconds] = clock.delayed(lambda: None, seconds, device)
            self.waits[seconds]()

    def ended(self) -> None:
        """The process ends before its last step: write what was measured."""
        if self.process == os.getpid() and not self.written:
            if self.marks:
                self.problem = "the script ended before enough steps were traced"
            self.write()

    def write(self) -> None:
        """Write what the controller needs to know of this process."""
        self.written = True
        seconds = self._seconds()[self.first - 1 :]  # of the steps after the warm-up
        script = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
        entry, torch = _load("rank_entry.py"), sys.modules.get("torch")
        environment: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3]))}
        if torch is not None:
            environment |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
        _write(
            self.folder / f"rank-{self.process}.json",
            {
                "rank": self.rank,
                "process": self.process,
                "count": len(self.ends),
                "seconds": seconds[len(CONTROL) :],
                "ends": self.ends[self.first + len(CONTROL) - 1 :] if self.device is None else [],
                "delayed_over_usual": delayed_over_usual(seconds, self.control, self.control_delay),
                "first_step_seconds": self.first_step_seconds,
                "peak_memory_bytes": self.memory,
                "on_gpu": self.device is not None,
                "prefix": sys.prefix,
                "environment": environment,
                "foreign": [script] * entry.is_foreign("script", script) + entry.foreign(),
                "problem": self.problem,
            },
        )

    def raised(self, error: BaseException) -> None:
        """Write the exception that ends this process, before Python prints it."""
        lines = traceback.format_exception(error)
        _write(
            self.folder / f"error-{self.process}.json",
            {
                "rank": int(os.environ.get("RANK", -1)),
                "at": time.monotonic(),
                "summary": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:MOST_LETTERS],
                "traceback": "".join(lines)[-(2**14) :],
            },
        )


def traced(folder: Path, gpu: int | None, marks: Sequence[Any], steps: int) -> Iterator[None]:
    """Trace some steps, and then some with Python functions; each step lasts from one `next` to another."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    step_name, part_name, nbytes = marks
    device, part = torch.device("cpu" if gpu is None else f"cuda:{gpu}"), ExitStack()
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in "ab")

    def mark() -> None:
        if gpu is not None:
            target.copy_(source)

    def optimizer_begins(*_: object) -> None:  # torch takes a result for new arguments
        part.enter_context(record_function(f"{part_name}optimizer"))

    optimizer = sys.modules[OPTIMIZERS]
    optimizer.register_optimizer_step_pre_hook(optimizer_begins)
    optimizer.register_optimizer_step_post_hook(lambda *_: part.close())
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (gpu is not None)
    for kind, count in (("trace", 1 + steps), ("stacks", 1 + STACKS)):
        with profile(activities=activities, with_stack=kind == "stacks") as profiler:
            for _ in range(count):
                mark()
                with record_function(step_name), part:
                    yield
            mark()
            if gpu is not None:
                torch.cuda.synchronize(device)
        profiler.export_chrome_trace(str(folder / f"{kind}-{os.getpid()}.json"))


def delayed_over_usual(seconds: Sequence[float], control: float, delay: float) -> list[float]:
    """Return by how much steps with a delay are longer, in each half of the control.

    The result is 1 + `control` if the whole `delay` shows. seconds: of the steps after the warm-up.
    """
    if len(seconds) < len(CONTROL) or not delay:
        return []
    half = len(CONTROL) // 2
    steps = [[*zip(CONTROL, seconds, strict=False)][begin : begin + half] for begin in (0, half)]
    times = [[[one for kind, one in of_half if kind == wanted] for wanted in "DU"] for of_half in steps]
    return [1 + control * (median(delayed) - median(usual)) / delay for delayed, usual in times]


def _load(path: str) -> Any:
    """Load a file of this ddpperf by its path: the script may import another ddpperf, or none."""
    place = Path(__file__).parent / path
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Write a whole file, or none."""
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(fields), encoding="utf-8")
    part.replace(path)


class Finder:
    """Finder of modules that adds the marks to torch's optimizers when they are imported."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            # torch.compile would compile the marks into a step of an optimizer
            uncompiled = sys.modules["torch"]._disable_dynamo(lambda *of: self.marks.optimizer_stepped(*of))
            module.register_optimizer_step_post_hook(uncompiled)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(fields: dict[str, Any]) -> Marks:
    """Prepare this process, before the script begins."""
    marks, usual = Marks(fields), sys.excepthook
    sys.meta_path.insert(0, Finder(marks))

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        marks.raised(error)
        usual(kind, error, trace)

    sys.excepthook = hook
    return marks


if VARIABLE in os.environ:
    MARKS = install(json.loads(os.environ[VARIABLE]))
