"""The base class of all measurement specs: its fields, the check of their values, and their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ddpperf.errors import first_line, quoted, short

_types: Any = cache(partial(get_type_hints, include_extras=True))

MOST_DELAY_SECONDS = 10.0
MOST_RANKS = 2**16
MOST_INT = 2**53  # every smaller whole number is a float, too
# Fields of stored specs that this version no longer has. They are ignored when a spec is read.
RETIRED_FIELDS = ("cutout", "fault")
# Types of fields with limits that `Spec` checks: the least and the largest int, the largest float, or
# the pattern of a text and its name.
Positive = Annotated[int, 1]
Ranks = Annotated[int, 1, MOST_RANKS]
Fraction = Annotated[float, 1.0]
Delay = Annotated[float, MOST_DELAY_SECONDS]
Function = Annotated[str, r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", "package.module:function"]


class Rule:
    """A combination of field values that a spec needs.

    If the field `name` has one of `values`, each other field must have one of the values in `needed`.
    name: by default the rule always holds. values: by default all values except the field's default.
    """

    def __init__(self, name: str = "", values: tuple[object, ...] = (), **needed: tuple[object, ...]) -> None:
        self.name, self.values, self.needed = name, values, needed

    def problems(self, spec: object) -> Iterator[str]:
        value = getattr(spec, self.name or "measurement")
        if self.name and not (
            value in self.values if self.values else value != getattr(type(spec), self.name)
        ):
            return
        for other, allowed in self.needed.items():
            if (found := getattr(spec, other)) not in allowed:
                subject = f"{self.name}={value}" if self.name else value
                yield f"{subject} needs {other} {' or '.join(map(str, allowed))}, got {found}"


Rules = tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base class of all measurement specs: number of ranks and added delay.

    kinds: the classes of all measurement specs, by measurement.
    measurement: the name by which the ranks find the measurement.
    rules: the combinations of values that it needs, besides the rules of its base classes.
    repeats: whether a round has one untimed step and then many timed steps. If False, a round is
    one long step.
    counts: whether the measurement counts instead of timing, so that one round is enough.
    compared_parts: by device, the number of parts into which an A/B run divides a round. Base and
    candidate take turns after each part, so that a short disturbance of the machine affects both.
    delay_seconds: a delay that is added to each step to test thresholds, on the GPU if there is
    one.
    """

    kinds: ClassVar[dict[str, type[Spec]]] = {}
    measurement: ClassVar[str]
    rules: ClassVar[Rules] = ()
    repeats: ClassVar[bool] = True
    counts: ClassVar[bool] = False
    compared_parts: ClassVar[Mapping[str, int]] = {"cpu": 1, "cuda": 1}
    seed: ClassVar[int] = 0
    set_epoch: ClassVar[bool] = True  # whether each epoch is shuffled differently
    execution: ClassVar[str] = "eager"

    world_size: Ranks
    delay_seconds: Delay = 0.0

    def __init_subclass__(cls) -> None:
        if "measurement" in vars(cls):
            cls.kinds[cls.measurement] = cls

    def __post_init__(self) -> None:
        if problem := next(self.problems(), ""):
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each combination of field values that cannot be measured."""
        yield from self.wrong_values({field.name: getattr(self, field.name) for field in fields(self)})
        if (images := getattr(self, "epoch_images", self.world_size)) < self.world_size:
            yield f"epoch_images must be a whole number of at least {self.world_size}, got {images}"
        for kind in reversed(type(self).__mro__):
            for rule in vars(kind).get("rules", ()):
                yield from rule.problems(self)

    @classmethod
    def wrong_values(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each field that cannot have its value.

        Each value must have the type of its field. An int is from 0 to `MOST_INT`, unless its type
        is annotated with other limits. A float is from 0 to the number that its type is annotated
        with. A text matches the pattern that its type is annotated with.
        """
        for name, value in values.items():
            kind = _types(cls)[name]
            of, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            if get_origin(of) is Literal:
                right, takes = value in get_args(of), f"one of {', '.join(get_args(of))}"
            elif of is int:
                least, most = (*limits, MOST_INT)[:2] if limits else (0, MOST_INT)
                right = type(value) is int and least <= value <= most
                takes = f"a whole number of at least {least}"
                takes += f" and at most {most}" if type(value) is int and value > most else ""
            elif of is float:
                right = type(value) in (int, float) and 0 <= value <= limits[0]
                takes = f"a number from 0 to {limits[0]:g}"
            elif limits:
                right, takes = isinstance(value, str) and bool(re.fullmatch(limits[0], value)), limits[1]
            else:
                right, takes = isinstance(value, of), f"a {getattr(of, '__name__', of)}"
            if not right:
                yield f"{name} must be {takes}, got {quoted(value)}"

    @property
    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        changed = (field for field in fields(self) if getattr(self, field.name) != field.default)
        return {field.name: getattr(self, field.name) for field in changed}

    @property
    def id(self) -> str:
        """Return the measurement and the changed fields as text that differs between different specs."""
        return " ".join(
            [self.measurement, *(f"{name}={value}" for name, value in self.changed_fields.items())]
        )

    @property
    def grouped(self) -> bool:
        """Return whether the ranks form a torch.distributed process group."""
        return True

    @property
    def maps_memory(self) -> bool:
        """Return whether the GPUs map each other's buffers by torch's symmetric memory."""
        return False

    @property
    def on_cpu(self) -> bool:
        """Return whether a measured step works on the CPU, even in ranks that have GPUs."""
        return False

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the user's functions that the ranks import, each as `package.module:function`."""
        return ()

    @property
    def captured(self) -> bool:
        """Return whether a measured step is replayed from a CUDA graph."""
        return "graph" in self.execution

    @property
    def calls(self) -> int:
        """Return how many collective calls a measured step makes, or 1 for a training step.

        The seconds of a sample are those of one collective call.
        """
        return 1

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile compiles a part of a measured step."""
        return "compile" in self.execution

    def turns(self, size: int) -> list[list[int]]:
        """Return the groups of ranks that measure together, in the order in which they take turns.

        size: the number of ranks in the process set.
        """
        return [list(range(self.world_size))]


def to_json(spec: Spec) -> dict[str, Any]:
    """Return a measurement spec as a JSON object, with its kind of measurement as "measurement".

    A field with its default value is omitted, so that the older code of an A/B run's base can read
    the object although it does not know the field.
    """
    return {"measurement": spec.measurement, **spec.changed_fields}


def from_json(fields: dict[str, Any]) -> Spec:
    """Return the measurement spec for a JSON object that `to_json` made, without retired fields.

    Raises ValueError for any other JSON object.
    """
    values = {name: value for name, value in fields.items() if name not in RETIRED_FIELDS}
    name = values.pop("measurement", None)
    if name not in tuple(Spec.kinds):
        raise ValueError(f"measurement is {quoted(name)}; it must be one of {', '.join(Spec.kinds)}")
    try:
        return Spec.kinds[name](**values)
    except TypeError as error:
        found = f"{short(', '.join(values))} ({first_line(error)})"
        raise ValueError(f"{name} has other fields than these: {found}") from error
