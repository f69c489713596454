"""What can be measured: frozen specs that travel as plain JSON. Standard library only.

Equal specs are equal work: a stored time is comparable with a new one when their specs are equal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

Model = Literal["resnet18", "resnet18_cifar", "resnet50_cifar"]
Strategy = Literal["single", "ddp"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Form = Literal["eager"]
Algorithm = Literal["backend"]
FaultKind = Literal["raise", "hang", "kill", "exit"]
FaultCommand = Literal["open", "sample", "close"]
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does instead of its work, so that the handling of it can be tested.

    kind: "raise" an exception, "hang" for ever, "kill" itself with SIGKILL, "exit" with status 0.
    command: the command of a measurement at which it happens.
    """

    kind: FaultKind
    rank: int
    command: FaultCommand = "sample"

    def __post_init__(self) -> None:
        _require_one_of("fault kind", self.kind, get_args(FaultKind))
        _require_one_of("fault command", self.command, get_args(FaultCommand))
        _require_at_least("fault rank", self.rank, 0)


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One optimizer step of a model: forward, backward, gradient synchronization, update.

    precision: fp32 without TF32, tf32 with it (a GPU's), or bf16 and fp16 autocast over fp32 parameters, fp16 with a
    gradient scaler. Weak scaling holds `per_rank_batch_size`; the global batch is `world_size` times as large. The strategy
    "single" has no process group: each rank of the set does the same step alone, one rank at a time.
    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "training_step"

    model: Model = "resnet18"
    world_size: int
    per_rank_batch_size: int
    strategy: Strategy
    precision: Precision = "fp32"
    form: Form = "eager"
    fault: Fault | None = None

    def __post_init__(self) -> None:
        _require_one_of("model", self.model, get_args(Model))
        _require_one_of("strategy", self.strategy, get_args(Strategy))
        _require_one_of("precision", self.precision, get_args(Precision))
        _require_one_of("form", self.form, get_args(Form))
        _require_at_least("world_size", self.world_size, 1)
        _require_at_least("per_rank_batch_size", self.per_rank_batch_size, 1)
        if self.model == "resnet18" and self.per_rank_batch_size < 2:
            raise ValueError("resnet18 normalizes one value an image in its last stage: use a batch of at least 2")
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(f"strategy single is one device, got world_size={self.world_size}; use world_size=1 or ddp")

    @property
    def in_turn(self) -> bool:
        """Whether the ranks work alone, one after the other, rather than together."""
        return self.strategy == "single"

    @property
    def id(self) -> str:
        """The cell's part of a test id, which is a stored key: every part, always in this order."""
        work = f"world_size={self.world_size}-batch={self.per_rank_batch_size}-{self.model}"
        return f"{work}-{self.strategy}-{self.precision}-{self.form}"

    def one_device(self) -> TrainingSpec:
        """The same step on one device without communication: the t(1) of a speedup."""
        return dataclasses.replace(self, world_size=1, strategy="single", fault=None)


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec:
    """One in-place sum of a float32 buffer of `nbytes` bytes over all ranks, by the backend's own all_reduce.

    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "all_reduce"

    world_size: int
    nbytes: int
    algorithm: Algorithm = "backend"
    form: Form = "eager"
    fault: Fault | None = None

    def __post_init__(self) -> None:
        _require_at_least("world_size", self.world_size, 2)
        _require_at_least("nbytes", self.nbytes, FLOAT32_BYTES)
        _require_one_of("algorithm", self.algorithm, get_args(Algorithm))
        _require_one_of("form", self.form, get_args(Form))
        if self.nbytes % FLOAT32_BYTES:
            raise ValueError(f"nbytes must be a multiple of a float32's {FLOAT32_BYTES} bytes, got {self.nbytes}")

    @property
    def in_turn(self) -> bool:
        return False

    @property
    def id(self) -> str:
        return f"world_size={self.world_size}-{format_bytes(self.nbytes)}-{self.algorithm}-{self.form}"


Spec = TrainingSpec | AllReduceSpec

_SPECS: dict[str, type[TrainingSpec] | type[AllReduceSpec]] = {spec.measurement: spec for spec in (TrainingSpec, AllReduceSpec)}


def to_json(spec: Spec) -> dict[str, Any]:
    """The spec as JSON values, with the name of its measurement under "measurement"."""
    return {"measurement": spec.measurement, **dataclasses.asdict(spec)}


def from_json(fields: dict[str, Any]) -> Spec:
    """The spec that `to_json` wrote; raises ValueError for anything else."""
    values = dict(fields)
    name = values.pop("measurement", None)
    _require_one_of("measurement", name, tuple(_SPECS))
    try:
        if values.get("fault") is not None:
            values["fault"] = Fault(**values["fault"])
        return _SPECS[name](**values)
    except TypeError as error:
        raise ValueError(f"{name} has other fields than these: {', '.join(values)} ({error})") from error


def format_bytes(nbytes: int) -> str:
    """A size as test ids spell it: 1 KiB is `1KiB`; sizes that are no whole KiB stay in bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


def _require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _require_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
