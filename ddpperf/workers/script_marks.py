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
import os
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

VARIABLE = "DDPPERF_SCRIPT"  # JSON with the fields that `Marks` takes
ENOUGH = "enough"
BEAT_SECONDS = 0.2  # a process shows that its steps go on by touching a file
# The control steps after the warm-up: usual ones, and those with a delay. Each half is balanced.
CONTROL = "UDDUDUUDDUUDUDDU"
LEAST_STEPS = 10  # are measured, however long they take
MOST_STEPS = 20_000
TRACED_STEPS, STACKS = 4, 1  # in the two traces, besides a first step
OPTIMIZERS = "torch.optim.optimizer"
MOST_LETTERS = 200


class Marks:
    """The ends of the steps of one process.

    folder: for the files. began: the time.monotonic() value at which the run began. first: the first step
    after the warm-up. Of the next steps, those marked in CONTROL are delayed by the fraction `control` of a
    step. The steps after them are measured. steps: how many, or 0 to measure until there is a file ENOUGH.
    delay: seconds by which each step is delayed. traced: whether steps are traced after the measured ones;
    `marks` are then the names of a step and of a part in a trace, and the bytes of the copy that marks a
    step there.
    """

    def __init__(
        self,
        folder: str,
        began: float,
        first: int,
        steps: int,
        control: float = 0.0,
        delay: float = 0.0,
        traced: bool = False,
        marks: Sequence[Any] = (),
    ) -> None:
        self.folder, self.began, self.first = Path(folder), began, first
        self.most, self.least = (steps, steps) if steps else (MOST_STEPS, LEAST_STEPS)
        self.control, self.delay, self.traced, self.marks = control, delay, traced, marks
        self.explicit = False  # whether the script marks its steps itself
        self._forget()

    def _forget(self) -> None:
        self.process = os.getpid()
        self.first_step_seconds = 0.0
        self.ends: list[Any] = []  # of steps: times, or events of a GPU
        self.on_gpu = False
        self.enough = False
        self.stepped: set[int] = set()  # the optimizers that have stepped since the last mark
        self.beaten = 0.0
        self.done = False
        self.trace: Trace | None = None
        self.control_delay = 0.0
        self.cycles = 0.0  # of the GPU's clock in a second

    def optimizer_stepped(self, optimizer: object, *_: object) -> None:
        """Called by torch after each step of any optimizer."""
        if self.explicit or (self.done and self.trace is None):
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
        if not self.done or self.trace is not None:
            self.mark()

    def mark(self) -> None:
        """End a step."""
        if self.process != os.getpid():  # in a fork
            self._forget()
        torch = sys.modules.get("torch")
        cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        if cuda is not None and cuda.is_current_stream_capturing():
            return  # the steps of a CUDA graph are its replays
        if self.trace is not None:
            if not self.trace.mark():
                self.trace = None
                self.write()
            return
        if not self.ends:
            self.first_step_seconds, self.on_gpu = time.monotonic() - self.began, cuda is not None
            atexit.register(self.ended)
        step = len(self.ends) - self.first  # that ends now, after the warm-up
        in_control = 0 <= step < len(CONTROL)
        delay = self.delay + (self.control_delay if in_control and CONTROL[step] == "D" else 0.0)
        if delay:
            self._wait(delay)
        now = time.perf_counter()
        if now - self.beaten > BEAT_SECONDS:
            self.beaten = now
            (self.folder / f"beat-{self.process}").touch()
            self.enough = (self.folder / ENOUGH).exists()
        if self.on_gpu and cuda is not None:
            self.ends.append(cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(now)
        if self.control and step == 0:
            self.control_delay = self.control * median(self._seconds()[self.first // 2 :])
        taken = step + 1 - len(CONTROL)
        if taken == 0:
            (self.folder / f"ready-{self.process}").touch()
        if taken >= self.most or (taken >= self.least and self.enough):
            self.done = True
            if self.traced:
                self.trace = Trace(self.folder, self.on_gpu, self.marks)
            else:
                self.write()

    def _seconds(self) -> list[float]:
        """Return the seconds of each step but step 0."""
        if self.on_gpu:
            self.ends[-1].synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self.ends)]
        return [after - before for before, after in pairwise(self.ends)]

    def _wait(self, seconds: float) -> None:
        """Let the device and this process wait: a device that waits for launches would hide a delay."""
        if self.on_gpu:
            torch = sys.modules["torch"]
            self.cycles = self.cycles or _cycles(torch)
            torch.cuda._sleep(int(seconds * self.cycles))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def ended(self) -> None:
        """The process ends before its last step: write what was measured."""
        if self.process == os.getpid() and not (self.done and self.trace is None):
            if self.traced:
                Trace.problem = "the script ended before enough steps were traced"
            self.done, self.trace = True, None
            self.write()

    def write(self) -> None:
        """Write what the controller needs to know of this process."""
        torch, rank, memory = sys.modules.get("torch"), int(os.environ.get("RANK", 0)), 0
        if torch is not None:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                rank = torch.distributed.get_rank()
            memory = torch.cuda.max_memory_allocated() if self.on_gpu else 0
        seconds = self._seconds()[self.first - 1 :]  # of the steps after the warm-up
        _write(
            self.folder / f"rank-{self.process}.json",
            {
                "rank": rank,
                "process": self.process,
                "count": len(self.ends),
                "seconds": seconds[len(CONTROL) :],
                "ends": [] if self.on_gpu else self.ends[self.first + len(CONTROL) - 1 :],
                "delayed_over_usual": delayed_over_usual(seconds),
                "first_step_seconds": self.first_step_seconds,
                "peak_memory_bytes": memory,
                "on_gpu": self.on_gpu,
                "prefix": sys.prefix,
                "environment": _environment(torch),
                "foreign": _foreign(),
                "problem": Trace.problem,
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


class Trace:
    """Two traces of torch's profiler, of steps after the measured ones; the second has Python functions."""

    problem = ""

    def __init__(self, folder: Path, on_gpu: bool, marks: Sequence[Any]) -> None:
        self.torch, self.on_gpu = sys.modules["torch"], on_gpu
        self.step_name, self.part_name, nbytes = marks
        self.device = self.torch.device("cuda" if on_gpu else "cpu")
        self.copies = [self.torch.zeros(nbytes, dtype=self.torch.uint8, device=self.device) for _ in "ab"]
        self.files = [
            (folder / f"{kind}-{os.getpid()}.json", steps, kind == "stacks")
            for kind, steps in (("trace", 1 + TRACED_STEPS), ("stacks", 1 + STACKS))
        ]
        self.open: list[Any] = []  # the marks of a step, or of a part of it
        self.profiler: Any = None
        optimizer = sys.modules[OPTIMIZERS]
        optimizer.register_optimizer_step_pre_hook(self._optimizer_begins)
        optimizer.register_optimizer_step_post_hook(lambda *_: self._leave(1))
        self._start()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        _, self.left, stacks = self.files[0]
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        try:
            self.profiler = profile(activities=activities, with_stack=stacks)
            self.profiler.start()
        except Exception as error:
            Trace.problem = f"torch's profiler does not start ({type(error).__name__}: {error})"[
                :MOST_LETTERS
            ]
            self.profiler = None
        self._enter(self.step_name)

    def mark(self) -> bool:
        """End a step, and return whether another one is traced."""
        self._leave(0)
        self.left -= 1
        if self.left:
            self._enter(self.step_name)
            return True
        self._copy()
        if self.on_gpu:
            self.torch.cuda.synchronize()
        path, *_ = self.files.pop(0)
        if self.profiler is not None:
            try:
                self.profiler.stop()
                self.profiler.export_chrome_trace(f"{path}.part")
                os.replace(f"{path}.part", path)
            except Exception as error:
                Trace.problem = f"torch's profiler fails ({type(error).__name__}: {error})"[:MOST_LETTERS]
        if self.files:
            self._start()
        return bool(self.files)

    def _copy(self) -> None:
        if self.on_gpu:
            self.copies[0].copy_(self.copies[1])

    def _enter(self, name: str) -> None:
        if name == self.step_name:
            self._copy()
        self.open.append(self.torch.profiler.record_function(name))
        self.open[-1].__enter__()

    def _leave(self, kept: int) -> None:
        while len(self.open) > kept:
            self.open.pop().__exit__(None, None, None)

    def _optimizer_begins(self, *_: object) -> None:
        if self.open:
            self._enter(f"{self.part_name}optimizer")


def delayed_over_usual(seconds: Sequence[float]) -> list[float]:
    """Return the ratio of the times of delayed and of usual steps in each half of the control."""
    if len(seconds) < len(CONTROL):
        return []
    half = len(CONTROL) // 2
    steps = [[*zip(CONTROL, seconds, strict=False)][begin : begin + half] for begin in (0, half)]
    times = [[[one for kind, one in of_half if kind == wanted] for wanted in "DU"] for of_half in steps]
    return [median(delayed) / median(usual) for delayed, usual in times]


def _cycles(torch: Any, cycles: int = 10**7) -> float:
    """Measure how many cycles `torch.cuda._sleep` counts per second at the GPU's present clock."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    torch.cuda._sleep(cycles)  # loads the kernel
    first.record()
    torch.cuda._sleep(cycles)
    last.record()
    last.synchronize()
    return cycles / (float(first.elapsed_time(last)) / 1e3)


def _environment(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3]))}
    if torch is not None:
        found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    return found


def _foreign() -> list[str]:
    spec = importlib.util.spec_from_file_location("rank_entry", Path(__file__).with_name("rank_entry.py"))
    assert spec is not None and spec.loader is not None  # noqa: PT018
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    script = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
    found: list[str] = [script] * module.is_foreign("script", script) + module.foreign()
    return found


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Write a whole file, or none."""
    part = path.with_suffix(".part")
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
            module.register_optimizer_step_post_hook(self.marks.optimizer_stepped)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(fields: dict[str, Any]) -> Marks:
    """Prepare this process, before the script begins."""
    marks, usual = Marks(**fields), sys.excepthook
    sys.meta_path.insert(0, Finder(marks))

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        marks.raised(error)
        usual(kind, error, trace)

    sys.excepthook = hook
    return marks


if VARIABLE in os.environ:
    MARKS = install(json.loads(os.environ[VARIABLE]))
