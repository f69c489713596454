"""The measurement spec of an unchanged training script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import ClassVar

from ddpperf.specs.spec import Positive, Spec

RANKS = "{ranks}"  # stands for the number of ranks in a command


@dataclass(frozen=True, kw_only=True)
class ScriptSpec(Spec):
    """Measurement spec for the training steps of a script that is not changed.

    command: a line for the shell that starts the script on all ranks, such as `torchrun
    --nproc-per-node {ranks} train.py`; `{ranks}` stands for `world_size`.
    world_size: the number of processes that train.
    first_step: the first step after the warm-up. The next 16 steps are a control: half of them are
    delayed, so that a comparison shows whether it sees a delay.
    steps: how many steps are measured after the control; 0 for those of 5 seconds, but at least 10.

    A step ends when an optimizer of torch has made its step. With several optimizers, it ends when one
    of them steps again. If the script calls `ddpperf.step()`, only these calls end steps. A process set
    is a whole run of the script, which is ended after its last measured step.
    """

    measurement: ClassVar[str] = "script"
    repeats: ClassVar[bool] = False

    command: str
    first_step: Positive = 10
    steps: int = 0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            words = shlex.split(self.command, comments=True)
        except ValueError as error:
            yield f"command must be a line for the shell, got {self.command!r} ({error})"
            return
        if not words:
            yield "command must name a script, such as 'torchrun --nproc-per-node {ranks} train.py'; got none"

    @property
    def grouped(self) -> bool:
        return False  # the script makes its own process group

    @property
    def line(self) -> str:
        """The line for the shell, with the number of ranks."""
        return self.command.replace(RANKS, str(self.world_size))

    @property
    def functions(self) -> tuple[str, ...]:
        """The paths of what both sides need: Python files, or else a module's or the command's own."""
        words = shlex.split(self.command)
        modules = [f"{after.replace('.', '/')}.py" for word, after in pairwise(words) if word == "-m"]
        files = [word for word in words if word.endswith(".py")] or [*modules[-1:], *words[:1]][:1]
        return tuple(file if file.startswith((".", "/")) else f"./{file}" for file in files)

    @property
    def script(self) -> str:
        """The name of the script, for test ids."""
        return re.sub(r"[^\w.]+", "_", PurePath(self.functions[0]).name.removesuffix(".py"))
