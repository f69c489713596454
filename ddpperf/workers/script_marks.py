"""Marks the ends of training steps inside the processes of a script, and writes their times to a file.

The module is loaded by its path, before the script, and imports only the standard library. torch's
optimizers then call a function after each step. In the candidate of an A/B run, it delays some early
steps, which are not measured. The times of a process are written when the last step has ended, or when
the process ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import math
import mmap
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

VARIABLE = "DDPPERF_SCRIPT"  # JSON with what `Marks` reads
# Two numbers in a file that all processes share: after which step all ranks wait, and whether enough steps
# are measured.
TURN, LAST, ENOUGH = "turn", 0, 1
NEVER = 2**62
TURN_LOOK_SECONDS = 0.002
CONTEXT_BYTES = 2**30  # of a process on a GPU, besides what its tensors need
BEAT_SECONDS = 0.2  # a process shows that its steps go on by touching a file
# The control steps after the warm-up: usual ones, and those with a delay. Each half is balanced.
CONTROL = "UDDUDUUDDUUDUDDU"
LEAST_STEPS = 10  # are measured, however long they take
MOST_STEPS = 20_000
MEMORY_STEPS = 10  # after so many steps the peak memory is read
FEWEST_TRACED, MOST_TRACED, STACKS = 4, 16, 1  # steps in the two traces, besides a first step
OPTIMIZERS = "torch.optim.optimizer"
MOST_LETTERS = 200


class Steps:
    """The steps of one process, as far as they have come."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.rank = int(os.environ.get("RANK", 0))
        self.device: Any = None  # the GPU that trains
        self.count = 0  # of all steps
        self.begin: Any = None  # of the present step, or None if it is not timed
        # The number of each timed step, and when it began and ended: times, or events of a GPU. The steps of
        # the warm-up are forgotten after it.
        self.spans: list[tuple[int, Any, Any]] = []
        self.first_step_seconds = 0.0
        self.memory: list[int] = []  # its peak, after each MEMORY_STEPS measured steps
        self.optimizers: set[int] = set()  # that have stepped since the last mark
        self.control_delay = 0.0
        self.trace: Iterator[None] | None = None
        self.written, self.problem = False, ""

    def now(self) -> Any:
        """Return the time on the clock of this process, or an event of the GPU."""
        if self.device is None:
            return time.perf_counter()
        cuda = sys.modules["torch"].cuda
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self.device))
        return event

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step."""
        if self.device is None:
            return [end - begin for _, begin, end in self.spans]
        if self.spans:
            self.spans[-1][-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for _, begin, end in self.spans]


class Marks:
    """The ends of the steps of one process, and its turns.

    The fields are read from JSON. folder: for the files. began: the time.monotonic() value at which the
    run began. first: the first step after the warm-up. control: of the next steps, those marked in CONTROL
    are delayed by this fraction of a step. The steps after them are measured. steps: how many, or 0 to
    measure until TURN says that it is enough. delay: seconds by which each step is delayed. marks: the
    names of a step and of a part in a trace, and the bytes of the copy that marks a step there; if not
    empty, some steps after the measured ones are traced.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.folder, self.began, self.first = Path(fields["folder"]), fields["began"], fields["first"]
        steps: int = fields["steps"]
        self.most, self.least = (steps, steps) if steps else (MOST_STEPS, LEAST_STEPS)
        self.control, self.delay, self.marks = fields["control"], fields["delay"], fields["marks"]
        self.turn = turn_of(self.folder)
        self.explicit = False  # whether the script marks its steps itself
        self.beaten = 0.0
        self.waits: dict[float, Callable[[], None]] = {}
        self.steps = Steps()

    def optimizer_stepped(self, optimizer: object, *_: object) -> None:
        """Called by torch after each step of any optimizer."""
        if self.explicit:
            return
        done = self.steps.optimizers
        if done and id(optimizer) not in done:
            done.add(id(optimizer))
            return
        self.steps.optimizers = {id(optimizer)}
        self.mark()

    def step(self) -> None:
        """Called by `ddpperf.step()`: from now on, only these calls end steps."""
        if not self.explicit:
            self.explicit, self.steps = True, Steps()
        self.mark()

    def mark(self) -> None:
        """End a step."""
        if self.steps.process != os.getpid():  # in a fork
            self.steps = Steps()
        steps, torch = self.steps, sys.modules.get("torch")
        cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        if cuda is not None and cuda.is_current_stream_capturing():
            return  # the steps of a CUDA graph are its replays
        number = steps.count - self.first  # of this step, after the warm-up
        if not steps.count:
            self._begin(torch)
        in_control = 0 <= number < len(CONTROL)
        if delay := self.delay + (steps.control_delay if in_control and CONTROL[number] == "D" else 0.0):
            self._wait(delay)
        now = time.perf_counter()
        if now - self.beaten > BEAT_SECONDS:
            self.beaten = now
            (self.folder / f"beat-{steps.process}").touch()
        steps.count += 1
        if steps.trace is not None:
            self._trace_next()
        elif not steps.written:
            end = steps.now()
            if steps.begin is not None:
                steps.spans.append((number, steps.begin, end))
                self._timed(number)
            steps.begin = end
        if self.turn[LAST] <= steps.count:
            self._wait_for_turn()

    def _begin(self, torch: Any) -> None:
        """The first step has ended: look what trains, and see to it that the process writes at its end."""
        steps = self.steps
        steps.first_step_seconds = time.monotonic() - self.began
        if torch is not None and torch.cuda.is_initialized():
            # The current device need not be the one that trains
            steps.device = max(range(torch.cuda.device_count()), key=torch.cuda.max_memory_allocated)
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            steps.rank = torch.distributed.get_rank()
        if multiprocessing.parent_process() is None:
            atexit.register(self.ended)
        else:  # such a process ends without what atexit has registered
            multiprocessing.util.Finalize(None, self.ended, exitpriority=0)

    def _timed(self, number: int) -> None:
        """A step was timed: go on to the control, to the measured steps, or to the end of them."""
        steps, taken = self.steps, len(self.steps.spans) - len(CONTROL)
        if number < 0:
            return
        if number == 0:
            steps.control_delay = self.control * median(steps.seconds()[self.first // 2 :])
            del steps.spans[:-1]
        elif taken == 0:
            (self.folder / f"ready-{steps.process}").touch()
        elif taken > 0 and taken % MEMORY_STEPS == 0 and steps.device is not None:
            steps.memory.append(sys.modules["torch"].cuda.max_memory_allocated(steps.device))
        if taken >= self.most or (taken >= self.least and self.turn[ENOUGH]):
            count = min(MOST_TRACED, max(FEWEST_TRACED, self.most // 10))  # the same on all ranks
            steps.trace = traced(self.folder, steps.device, self.marks, count) if self.marks else iter(())
            self._trace_next()

    def _wait_for_turn(self) -> None:
        """Wait until the other scripts have had their turns. All ranks wait after the same step.

        A rank first says which step it has ended. It may then have to go on to another one, or have to wait
        for one that does, before what is queued on its GPU can end. After the warm-up, the next step is
        not timed: nothing is queued when it begins, and other ranks may begin it earlier.
        """
        steps, cuda = self.steps, sys.modules["torch"].cuda if self.steps.device is not None else None
        place = self.folder / f"turn-{steps.process}"
        waits = {"count": steps.count, "still": False, "room": math.inf}
        _write(place, waits)
        if cuda is not None:
            cuda.synchronize(steps.device)
            free, _ = cuda.mem_get_info(steps.device)
            waits["room"] = free / (cuda.memory_reserved(steps.device) + CONTEXT_BYTES)
        _write(place, waits | {"still": True})
        while self.turn[LAST] <= steps.count:
            time.sleep(TURN_LOOK_SECONDS)
        steps.begin = None if steps.count > self.first else steps.now()

    def _trace_next(self) -> None:
        """Begin the next traced step; after the last one, write what was measured."""
        steps = self.steps
        try:
            next(steps.trace)  # type: ignore[arg-type]
        except StopIteration:
            self.write()
        except Exception as error:
            steps.problem = f"torch's profiler fails ({type(error).__name__}: {error})"[:MOST_LETTERS]
            self.write()

    def _wait(self, seconds: float) -> None:
        """Let the device and this process wait."""
        gpu = self.steps.device
        if gpu is None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return
        torch = sys.modules["torch"]
        with torch.cuda.device(gpu):
            if seconds not in self.waits:
                clock = _load("../measuring/clock.py")
                device = torch.device("cuda", gpu)
                self.waits[seconds] = clock.delayed(lambda: None, seconds, device)
            self.waits[seconds]()

    def ended(self) -> None:
        """The process ends: if its last step has not come, write what was measured."""
        steps = self.steps
        if steps.process != os.getpid():
            return
        if not steps.written:
            if self.marks:
                steps.problem = "the script ended before enough steps were traced"
            self.write()
        (self.folder / f"over-{steps.process}").touch()

    def write(self) -> None:
        """Write what the controller needs to know of this process."""
        steps = self.steps
        steps.trace, steps.written = None, True
        seconds = steps.seconds()
        script = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
        entry, torch = _load("rank_entry.py"), sys.modules.get("torch")
        environment: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3]))}
        if torch is not None:
            environment |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
        _write(
            self.folder / f"rank-{steps.process}.json",
            {
                "rank": steps.rank,
                "process": steps.process,
                "count": steps.count,
                "numbers": [number for number, *_ in steps.spans[len(CONTROL) :]],
                "seconds": seconds[len(CONTROL) :],
                "delayed_over_usual": delayed_over_usual(seconds, self.control, steps.control_delay),
                "first_step_seconds": steps.first_step_seconds,
                "peak_memory_bytes": steps.memory,
                "on_gpu": steps.device is not None,
                "prefix": sys.prefix,
                "environment": environment,
                "foreign": [script] * entry.is_foreign("script", script) + entry.foreign(),
                "problem": steps.problem,
            },
        )

    def raised(self, error: BaseException) -> None:
        """Write the exception that ends this process, before Python prints it."""
        lines = traceback.format_exception(error)
        _write(
            self.folder / f"error-{os.getpid()}.json",
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
    # A garbage collection after a trace with Python functions crashes torch 2.14, if a data loader began its
    # next epoch in the other trace. The script is ended after its traces.
    gc.disable()
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


def turn_of(folder: Path) -> memoryview:
    """Return the numbers in the file TURN."""
    with open(folder / TURN, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


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
