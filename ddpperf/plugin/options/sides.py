"""The two sides of an A/B run: the base and the candidate, as the options name them, each tried before anything is measured."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpperf.plugin.options.spec_fields import Value, changed, read_spec_fields
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import Spec
from ddpperf.workers.interpreter import Found, Side, check_side, rank_environment

# what ddpperf itself sets for a rank, or relies on
OWN_VARIABLES = r"RANK|LOCAL_RANK|TMPDIR|DDPPERF_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
OPTIONS = {
    "--against": ("PYTHON", "measure side by side with a candidate: an interpreter that has torch"),
    "--against-root": ("DIR", "another checkout of the code under test, the candidate's, first on its path"),
    "--against-env": ("NAME=VALUE", "a variable of NCCL's or torch's for the candidate; again for another"),
    "--against-spec": (
        "FIELD=VALUE",
        "set a field of the candidate's trainings, as --spec does, or form; again for another",
    ),
    "--baseline-python": ("PYTHON", "the base's interpreter (default: this one)"),
    "--baseline-root": ("DIR", "the base's checkout, first on its path"),
}
REPEATED = ("--against-env", "--against-spec")


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What is compared.

    spec_fields: what --against-spec sets in the candidate's trainings. delay_seconds: put into each step of what its tests
    measure as their own. torchvision: whether both sides have it. base_torch: the base's version, where it was tried.
    """

    base: Side
    candidate: Side
    spec_fields: Mapping[str, Value]
    delay_seconds: float = 0.0
    torchvision: bool = True
    base_torch: str = ""

    def are_equal(self, here: Path) -> bool:
        """Whether both run the same code in the same way. here: the tree that a side without a root runs."""
        (base, candidate) = (
            (_as_found(side.python), (side.root or here).resolve()) for side in (self.base, self.candidate)
        )
        return base == candidate and not (
            self.spec_fields or self.delay_seconds or self.candidate.environment
        )

    @property
    def here(self) -> str:
        """The name of the side that is this very environment; the base's where neither is."""
        return CANDIDATE if _is_elsewhere(self.base) and not _is_elsewhere(self.candidate) else BASE

    def candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """What the candidate measures where the base measures `spec`, a test's own or a leg; None for the same."""
        other = changed(spec, self.spec_fields)
        if own and self.delay_seconds:
            other = dataclasses.replace(other, delay_seconds=self.delay_seconds)
        return other if other != spec else None


def add_side_options(group: pytest.OptionGroup) -> None:
    """Declare the options of A/B runs."""
    for name, (metavar, text) in OPTIONS.items():
        repeated: dict[str, Any] = {"action": "append", "default": []} if name in REPEATED else {}
        group.addoption(name, metavar=metavar, help=text, **repeated)


def has_sides(config: pytest.Config) -> bool:
    """Whether an option names a side."""
    return any(config.getoption(name) not in (None, []) for name in OPTIONS)


def names_candidate(config: pytest.Config) -> bool:
    """Whether an option names the candidate, which otherwise is this environment."""
    return any(config.getoption(name) not in (None, []) for name in OPTIONS if name.startswith("--against"))


def read_sides(config: pytest.Config, *, device: str, model: str, delay_seconds: float = 0.0) -> Sides | None:
    """The sides that the options name, None without any; raises pytest.UsageError with one sentence for one that cannot run.

    Imports torch and an own model by each interpreter, root and environment that is not this one, which takes seconds.
    """
    if not has_sides(config):
        return None
    _require_root(config)
    spec_fields = read_candidate_fields(config)
    variables = _read_variables(config.getoption("--against-env"))
    if [name for name in OPTIONS if config.getoption(name)] == [
        "--against-env"
    ] and variables.items() <= rank_environment(device).items():
        name, value = next(iter(variables.items()))
        raise pytest.UsageError(
            f"--against-env {name}={value[:40]} changes nothing, for the base has it from this environment; unset it, or name "
            "another value"
        )
    base = _side(config, BASE, "--baseline-python", "--baseline-root", {})
    candidate = _side(config, CANDIDATE, "--against", "--against-root", variables)
    found: dict[str, Found] = {}
    for side in (base, candidate):
        known = side is candidate and dataclasses.replace(side, name=BASE) == base
        if _is_elsewhere(side) and not known:
            found[side.name] = check_side(side, _asked(side), device, model)
    return Sides(
        base=base,
        candidate=candidate,
        spec_fields=spec_fields,
        delay_seconds=delay_seconds,
        torchvision=all(each.torchvision for each in found.values()),
        base_torch=found[BASE].torch if BASE in found else "",
    )


def _require_root(config: pytest.Config) -> None:
    """pytest looks for its root before it knows our options, and takes a folder or a file among their values for tests, unless
    --rootdir or -c names it."""
    if config.option.rootdir or config.option.inifilename:
        return
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0]).resolve()
        if not path.is_relative_to(config.rootpath):
            raise pytest.UsageError(
                f"pytest took {config.rootpath} for the root of this project, in which {path} is not; name the tests first, "
                "and write options with =, as --against-root=DIR"
            )


def _side(
    config: pytest.Config, name: str, python_option: str, root_option: str, variables: Mapping[str, str]
) -> Side:
    python, root = config.getoption(python_option), config.getoption(root_option)
    return Side(
        name=name,
        python=sys.executable if python is None else _interpreter(python_option, python),
        root=None if root is None else _root(root_option, root),
        environment=variables,
    )


def _interpreter(option: str, text: str) -> str:
    """The absolute path of an interpreter; a link stays one, for beside it lies what makes a virtual environment."""
    path = text if os.sep in text else shutil.which(text) or ""
    what, instead = "", "name another"
    if os.path.isdir(path or text):
        what, instead = "is a folder", "name its bin/python"
    elif not path:
        what = "is not on PATH"
    elif not os.path.exists(path):
        what = "is not there"
    elif not os.path.isfile(path):
        what = "is no file"
    elif not os.access(path, os.X_OK):
        what = "is not executable"
    if what:
        raise pytest.UsageError(f"{option} takes a Python interpreter, got {text!r}, which {what}; {instead}")
    return str(Path(path).absolute())


def _root(option: str, text: str) -> Path:
    if not os.path.isdir(text):
        raise pytest.UsageError(
            f"{option} takes a folder, a checkout of the code under test, got {text!r}; name another"
        )
    return Path(text).resolve()


def _read_variables(given: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise pytest.UsageError(
                f"--against-env takes NAME=VALUE, got {text[:60]!r}; pass for example --against-env NCCL_ALGO=Ring"
            )
        if re.fullmatch(OWN_VARIABLES, name):
            raise pytest.UsageError(
                f"--against-env cannot set {name}, which ddpperf sets for every rank; leave it out"
            )
        if name in variables:
            raise pytest.UsageError(
                f"--against-env sets {name} twice, got {variables[name][:40]!r} and {value[:40]!r}; set it once"
            )
        variables[name] = value
    return variables


def read_candidate_fields(config: pytest.Config) -> dict[str, Value]:
    """The fields of --against-spec: those of --spec, and the form."""
    return read_spec_fields(config.getoption("--against-spec"), "--against-spec", execution=True)


def _as_found(python: str) -> tuple[Path, Path]:
    """Where an interpreter lies, which makes its environment, and what it is a link to."""
    return Path(python).parent.resolve(), Path(python).resolve()


def _is_elsewhere(side: Side) -> bool:
    return side != Side(name=side.name)


def _asked(side: Side) -> str:
    """The options that made a side."""
    python, root = (
        ("--baseline-python", "--baseline-root") if side.name == BASE else ("--against", "--against-root")
    )
    words = [f"{python} {side.python}"] if side.python != sys.executable else []
    words += [f"{root} {side.root}"] if side.root is not None else []
    return " ".join(
        words + [f"--against-env {name}={value[:40]!r}" for name, value in side.environment.items()]
    )
