"""The files of stored runs and baselines: finding, reading, checking and writing them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ddpperf import specs
from ddpperf.errors import MAX_LETTERS, first_line, quoted, short
from ddpperf.io.files import open_regular, temporary_file
from ddpperf.io.terminal_text import finite_json, printable_document
from ddpperf.results.outcomes import OutcomeKind, Status
from ddpperf.results.samples import Measured
from ddpperf.results.schema_2 import converted
from ddpperf.specs import Spec

SCHEMA = 3
COMMIT = re.compile(r"([0-9a-f]{4,64}\+?|nogit)?")  # also stands in git's command lines
HARDWARE_KEY = re.compile(r"[\w+-]+")  # names a folder, which must not be elsewhere

NOT_JSON = {  # what git may leave in place of a file, by its first bytes
    b"<<<<<<< ": "it has conflict markers of a merge",
    b"version https://git-lfs": "it is a pointer of Git LFS, whose file git lfs pull gets",
}
ANOTHER = "name another, or save one anew"  # advice for a stored run that cannot be read

# What code raises that reads damaged JSON:
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class NoBaseline(Exception):
    """Raised if there is no stored run to compare with; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A stored run to compare with: its measurements by test id, and its metrics as they are stored.

    `copied` is the run's memory copy, if the run measured one. `when` is the run's start in ISO
    8601, and `commit` is the project's commit. Both are empty if unknown. `environment` describes
    the machine and its software.
    """

    path: Path
    measured: dict[str, Measured]
    metrics: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    when: str
    copied: Measured | None = None
    commit: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_versions(self) -> list[str]:
        """The versions of torch that were measured, without repetitions."""
        return sorted({sample.torch for run in self.measured.values() for sample in run.samples})


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The folders of stored runs and of baselines for one hardware key, below the project's root."""

    root: Path
    hardware_key: str

    @property
    def runs(self) -> Path:
        """The folder of all stored runs, ignored by git."""
        return self.root / ".ddpperf" / "runs" / self.hardware_key

    @property
    def baselines(self) -> Path:
        """The folder of promoted baselines, tracked by git."""
        return self.root / "perf" / "baselines" / self.hardware_key

    def save_run(self, document: dict[str, Any], commit: str) -> Path:
        """Write a run into the folder of runs under the next file number; raise OSError on failure."""
        return _write_numbered(self.runs, f"{commit}_{datetime.now(UTC):%Y%m%dT%H%M%SZ}", document)

    def promote(self, document: dict[str, Any], name: str) -> Path:
        """Write a run as a baseline under the next file number; raise OSError on failure."""
        return _write_numbered(self.baselines, name, document)

    def find(self, wanted: str | Literal[True]) -> Path:
        """Return the path of the stored run that `--benchmark-compare[=wanted]` names.

        True means the newest baseline, or without baselines the newest run whose tests all passed.
        Text is a path, a file's number, the NAME that the run was saved under, or the beginning of
        the file name. Baselines go before runs. Raises NoBaseline if no file fits.
        """
        if wanted is True:
            return self._newest()
        if os.path.exists(wanted):  # a folder or a FIFO is refused when it is read
            return Path(wanted)
        for folder in (self.baselines, self.runs):
            if named := [path for path in numbered(folder) if _is_called(path, wanted)]:
                same = [path.name for path in named if _number(path) == _number(named[-1])]
                if len(same) > 1:
                    what = f"--benchmark-compare={wanted} fits {' and '.join(same)}"
                    raise NoBaseline(f"{what}; name one of these files, and give the other a new number")
                return named[-1]
        known = f"the number or name of one in {self.baselines} or {self.runs}"
        raise NoBaseline(f"--benchmark-compare={wanted} is neither a file nor {known}; name one of these")

    def _newest(self) -> Path:
        if promoted := self._promoted():
            return promoted[-1]
        for run in self._readable(reversed(numbered(self.runs)), lambda _, document: is_baseline(document)):
            return run.path
        looked = f"neither {self.baselines} nor {self.runs} holds a run that passed"
        advice = "save one with --benchmark-save=NAME, then compare"
        raise NoBaseline(f"no baseline for {self.hardware_key}: {looked}; {advice}")

    def newest_baseline(self) -> Baseline | None:
        """Return the newest promoted baseline, or None if there is none that can be read."""
        return next(self._readable(reversed(self._promoted())), None)

    def _promoted(self) -> list[Path]:
        """Return the baselines, oldest first; a merge may bring two files with one number."""
        paths = numbered(self.baselines)
        counts = Counter(map(_number, paths))
        return sorted(
            paths, key=lambda path: (_number(path), _date(path) if counts[_number(path)] > 1 else "")
        )

    def _readable(
        self, paths: Iterable[Path], wanted: Callable[[Path, Any], bool] = lambda path, document: True
    ) -> Iterator[Baseline]:
        """Yield the runs at `paths` that can be read, are no A/B runs, and that `wanted` accepts."""
        for path in paths:
            with contextlib.suppress(NoBaseline):
                document = read_document(path)
                if wanted(path, document):
                    yield self.read(document, path)

    def load(self, path: Path) -> Baseline:
        """Read a stored run; raise NoBaseline if it is damaged or of other hardware."""
        return self.read(read_document(path), path)

    def read(self, document: Any, path: Path) -> Baseline:
        """Return a stored run from its JSON; raise NoBaseline as `load` does. path: its file."""
        header = document["ddpperf"]
        if (key := header["hardware_key"]) != self.hardware_key:
            there, here = short(key), f"this is {self.hardware_key}; save a baseline here"
            raise NoBaseline(f"{path} was measured on {there}, {here}")
        if is_ab_run(header):
            raise NoBaseline(f"{path} is an A/B run, which has two versions of each time; name another run")
        try:
            names = [str(benchmark["fullname"]) for benchmark in document["benchmarks"]]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise NoBaseline(f"the baseline {path} has the test {short(twice[0])} twice; {ANOTHER}")
            stored = {
                str(benchmark["fullname"]): benchmark["extra_info"]["ddpperf"]
                for benchmark in document["benchmarks"]
            }
            measured = {test: Measured.from_json(fields) for test, fields in stored.items()}
            copied, environment = header.get("copied"), dict(header.get("environment", {}))
            run = Baseline(
                path=path,
                measured=measured,
                metrics={test: _metrics(fields.get("metrics", {})) for test, fields in stored.items()},
                when=str(document.get("datetime", "")),
                copied=Measured.from_json(copied) if copied is not None else None,
                commit=str(environment.get("commit", "")),
                environment=environment,
            )
            if not COMMIT.fullmatch(run.commit):
                raise ValueError(f"{quoted(run.commit)} is no commit")
        except DAMAGED as error:
            raise _damaged(path, error) from error
        if not measured:
            raise NoBaseline(f"the baseline {path} holds no measured test; {ANOTHER}")
        return run


def _metrics(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stored metrics of a test by name, with their values by process set."""
    for name, metric in stored.items():
        if not metric["by_set"]:
            raise ValueError(f"the metric {quoted(name)} has no value")
    return {
        str(name): {"by_set": {str(name): float(value) for name, value in metric["by_set"].items()}}
        for name, metric in stored.items()
    }


def newest_run(root: Path) -> Path:
    """Return the file of the newest run of a project; raise NoBaseline if there is none."""
    folder = root / ".ddpperf" / "runs"
    runs = [path for path in folder.glob("*/*.json*") if path.is_file()]  # no broken link, no FIFO
    newest = max(runs, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise NoBaseline(f"{folder} holds no run; measure one with python -m pytest perf/")
    return newest


def read_document(path: Path) -> Any:
    """Return the JSON of a stored run, which may be compressed as NAME.json.gz.

    Its part "ddpperf" has this version's schema, to which schema 2 is converted, and a hardware_key
    that can name a folder. Raises NoBaseline for any other JSON, and if the file is damaged, or has a
    NaN or an infinite number.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        for beginning, what in NOT_JSON.items():
            if content.startswith(beginning):
                raise ValueError(what)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        document = printable_document(finite_json(content.decode()))
    except (EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or first_line(error)
        raise NoBaseline(f"the baseline {path} cannot be read ({why}); {ANOTHER}") from error
    header = document.get("ddpperf") if isinstance(document, dict) else None
    if not isinstance(header, dict) or "schema" not in header:
        raise NoBaseline(f"{path} was not saved by ddpperf; name a file in .ddpperf/runs or perf/baselines")
    if (schema := header["schema"]) not in (2, SCHEMA):
        reads = f"this ddpperf reads 2 and {SCHEMA}; measure again"
        raise NoBaseline(f"{path} has schema {quoted(schema)}, {reads}")
    key = header.get("hardware_key")
    if not isinstance(key, str) or not HARDWARE_KEY.fullmatch(key):
        raise NoBaseline(f"{path} is damaged (its hardware_key is {quoted(key)}); name another run")
    try:
        return converted(document) if schema == 2 else document
    except DAMAGED as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> NoBaseline:
    return NoBaseline(f"the baseline {path} is damaged ({repr(error)[:MAX_LETTERS]}); {ANOTHER}")


def is_ab_run(header: Mapping[str, Any]) -> bool:
    """Return whether a run measured two versions of the code because its options named them."""
    return "judged" in header and header.get("compared_with") is None


def numbered(folder: Path) -> list[Path]:
    """Return the files of a folder that are named NNNN_*.json, the newest last."""
    numbered = [path for path in folder.glob("*.json*") if _number(path)]
    return sorted(numbered, key=lambda path: (_number(path), path.name))


def _number(path: Path) -> int:
    match = re.fullmatch(r"(\d{4,})_.*\.json(\.gz)?", path.name)
    return int(match[1]) if match else 0


def _date(path: Path) -> str:
    """Return when a stored run began, in ISO 8601; "" if its file cannot be read."""
    with contextlib.suppress(NoBaseline):
        return str(read_document(path).get("datetime", ""))
    return ""


def _is_called(path: Path, wanted: str) -> bool:
    if stem(path).partition("_")[2] in (wanted, wanted.removesuffix(".json")):
        return True
    return _number(path) == int(wanted) if wanted.isdecimal() else path.name.startswith(wanted)


def stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def is_baseline(document: Any) -> bool:
    """Return whether a run may be promoted.

    Every test that was not skipped must have passed and been measured, none deliberately slowed. The
    run must be no A/B run. A comparison must not have failed, and no test may look worse in it. A
    damaged run may not be promoted.
    """
    try:
        header, benchmarks = document["ddpperf"], document["benchmarks"]
        status = header["verdict"]["status"]
        kinds = {test: OutcomeKind(outcome["kind"]) for test, outcome in header["outcomes"].items()}
        required = {test for test, kind in kinds.items() if not kind.skipped}
        measured = {benchmark["fullname"] for benchmark in benchmarks}
        return bool(
            measured
            and measured == required
            and all(kinds[test] is OutcomeKind.PASSED for test in required)
            and not any(test["extra_info"]["ddpperf"]["spec"].get("delay_seconds") for test in benchmarks)
            and not is_ab_run(header)  # base and candidate evict each other's caches
            and status != Status.FAIL
            and not header.get("unfit")
        )
    except DAMAGED:
        return False


def to_json(document: dict[str, Any]) -> str:
    """Return a run as JSON; raise ValueError for a NaN. What JSON cannot hold becomes a text."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    return specs.to_json(value) if isinstance(value, Spec) else str(value)


def _write_numbered(folder: Path, name: str, document: dict[str, Any]) -> Path:
    """Write JSON completely or not at all under the next file number; never replace a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_file(folder, to_json(document)) as temporary:
        number = max(map(_number, folder.iterdir()), default=0)
        while True:
            number += 1
            path = folder / f"{number:04}_{name}.json"
            with contextlib.suppress(FileExistsError):
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    raise
                except OSError:  # a file system without hard links
                    path.touch(exist_ok=False)
                    os.replace(temporary, path)
                return path
