"""Where runs and baselines lie: found, read, checked, and written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ddpperf import specs
from ddpperf.results.outcomes import OutcomeKind, Status
from ddpperf.results.samples import Measured
from ddpperf.specs import Spec

SCHEMA = 2
COPY = "a copy of memory"  # the id of a run's memory copy, beside the ids of its tests
FIRST_RUNS = 5  # how many of the oldest baselines a history holds
MOST_READ = 20  # files of a history: 20 of 0.85 MB take 0.4 s


class NoBaseline(Exception):
    """There is nothing to compare with; one sentence says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An earlier run: its measurements by test id, and of a copy of memory, None if it is older than these.

    when: its beginning, in ISO 8601. commit: of its project, as `commits.commit` names it. Both empty if it does not say.
    """

    path: Path
    measured: dict[str, Measured]
    when: str
    copied: Measured | None = None
    commit: str = ""

    @property
    def with_copy(self) -> dict[str, Measured]:
        """The tests, and the copy among them."""
        return self.measured | ({COPY: self.copied} if self.copied is not None else {})


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """An earlier run. promoted: whether it is a baseline, rather than a run that was compared and passed."""

    measured: Mapping[str, Measured]
    promoted: bool


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The folders of one hardware key below the root of the project."""

    root: Path
    hardware_key: str

    @property
    def runs(self) -> Path:
        return self.root / ".ddpperf" / "runs" / self.hardware_key

    @property
    def baselines(self) -> Path:
        return self.root / "perf" / "baselines" / self.hardware_key

    def save_run(self, document: dict[str, Any], commit: str) -> Path:
        """Write a run under the next number; raises OSError where that cannot be done."""
        return _write(self.runs, f"{commit}_{datetime.now(UTC):%Y%m%dT%H%M%SZ}", document)

    def promote(self, document: dict[str, Any], name: str) -> Path:
        """Write a run as a tracked baseline under the next number; raises OSError where that cannot be done."""
        return _write(self.baselines, name, document)

    def find(self, wanted: str | Literal[True]) -> Path:
        """The file that `--benchmark-compare[=wanted]` means, a promoted baseline before a run; raises NoBaseline.

        wanted: True for the newest baseline, else the newest run whose tests all passed; or a path; or a file's number, or
        the NAME it was saved under, or the beginning of its file name.
        """
        if wanted is True:
            newest = next(reversed(_numbered(self.baselines)), None) or _newest_passed(self.runs)
            if newest is None:
                raise NoBaseline(
                    f"no baseline for {self.hardware_key}: neither {self.baselines} nor {self.runs} holds a run that passed; "
                    "save one with --benchmark-save=NAME, then compare"
                )
            return newest
        if os.path.isfile(wanted):
            return Path(wanted)
        for folder in (self.baselines, self.runs):
            if named := [path for path in _numbered(folder) if _is_called(path, wanted)]:
                return named[-1]
        advice = (
            "the option takes the word after it, so put it last"
            if os.path.exists(wanted)
            else "name one of theirs"
        )
        raise NoBaseline(
            f"--benchmark-compare={wanted} is no file, nor number or name of one in {self.baselines} or {self.runs}; {advice}"
        )

    def load(self, path: Path) -> Baseline:
        """Read a run back; raises NoBaseline for what is unreadable, not ours, or of other hardware."""
        return self._baseline(_document(path), path)

    def history(self, compared: Baseline) -> list[PastRun]:
        """The runs of this hardware that can be read, oldest first and none twice, with the one that is compared with.

        Of at most `MOST_READ` files: the first five baselines and the newest, then the newest runs that were compared whole and
        passed: of others nobody knows whether their code is slower. A baseline that measured what a run did is that run.
        """
        promoted, first = _numbered(self.baselines), FIRST_RUNS
        paths = [*promoted[:first], *reversed(promoted[first:]), *reversed(_numbered(self.runs))]
        found: list[tuple[Baseline, bool]] = []
        for path in paths[:MOST_READ]:
            with contextlib.suppress(NoBaseline):
                document, promoted_too = _document(path), path.parent == self.baselines
                passed = _passed(document) and document["ddpperf"]["verdict"]["status"] == Status.PASS
                if promoted_too or (passed and document["ddpperf"].get("compared_with")):
                    found.append((self._baseline(document, path), promoted_too))
        unique: list[tuple[Baseline, bool]] = []
        for run, promoted_too in [*found, (compared, False)]:
            if all(run.measured != known.measured for known, _ in unique):
                unique.append((run, promoted_too))
        unique.sort(key=lambda each: each[0].when)
        return [PastRun(measured=run.with_copy, promoted=promoted_too) for run, promoted_too in unique]

    def _baseline(self, document: Any, path: Path) -> Baseline:
        try:
            header = document["ddpperf"]
            schema, key = header["schema"], header["hardware_key"]
        except (KeyError, TypeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else "it holds something else"
            raise NoBaseline(
                f"{path} was not saved by ddpperf ({why}); name a file below {self.runs}"
            ) from error
        if schema != SCHEMA:
            raise NoBaseline(
                f"{path} has schema {schema!r}, this ddpperf reads {SCHEMA}; save a baseline anew"
            )
        if key != self.hardware_key:
            raise NoBaseline(
                f"{path} was measured on {key}, this is {self.hardware_key}; save a baseline here"
            )
        if "against" in header:
            raise NoBaseline(f"{path} measured two sides in turn, and this run one; name a run of one side")
        try:
            measured = {
                benchmark["fullname"]: Measured.from_json(benchmark["extra_info"]["ddpperf"])
                for benchmark in document["benchmarks"]
            }
            if not isinstance(document["machine_info"], dict):  # which pytest-benchmark reads
                raise TypeError("machine_info is no table")
            copied = Measured.from_json(header["copied"]) if header.get("copied") is not None else None
            commit = str(header.get("environment", {}).get("commit", ""))
            if not all(isinstance(test, str) for test in measured):
                raise TypeError("a test's fullname is no word")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise NoBaseline(
                f"the baseline {path} is damaged ({error!r}); name another, or save one anew"
            ) from error
        if not measured:
            raise NoBaseline(f"the baseline {path} holds no measured test; name another, or save one anew")
        return Baseline(
            path=path, measured=measured, when=str(document.get("datetime", "")), copied=copied, commit=commit
        )


def _document(path: Path) -> Any:
    """The JSON of a stored run; raises NoBaseline for a file that is cut, empty or no JSON, which has no NaN."""
    try:
        return json.loads(path.read_text(), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise NoBaseline(
            f"the baseline {path} cannot be read ({error}); name another, or save one anew"
        ) from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _numbered(folder: Path) -> list[Path]:
    """The files NNNN_*.json of a folder, the newest last."""
    with contextlib.suppress(OSError):
        return sorted(
            (path for path in folder.iterdir() if _number(path)), key=lambda path: (_number(path), path.name)
        )
    return []


def _number(path: Path) -> int:
    match = re.fullmatch(r"(\d{4,})_.*\.json", path.name)
    return int(match[1]) if match else 0


def _is_called(path: Path, wanted: str) -> bool:
    """Whether a word means this file: its number, or the beginning of its name with or without the number."""
    if wanted.isdecimal():
        return _number(path) == int(wanted)
    return path.name.startswith(wanted) or path.stem.partition("_")[2] == wanted


def is_baseline(document: dict[str, Any]) -> bool:
    """Whether a run may be a baseline: at least one test was measured, none passed without that, none was slower or slowed, and
    if it was compared, its controls held and its suspects were cleared."""
    header = document["ddpperf"]
    slowed = any(
        benchmark["extra_info"]["ddpperf"]["spec"].get("delay_seconds")
        for benchmark in document["benchmarks"]
    )
    measured = {benchmark["fullname"] for benchmark in document["benchmarks"]}
    kinds = {test: OutcomeKind(outcome["kind"]) for test, outcome in header["outcomes"].items()}
    expected = {test for test, kind in kinds.items() if not kind.skipped}
    passed = all(kinds[test] is OutcomeKind.PASSED for test in expected)
    alone = "against" not in header  # two sides that were measured in turn warmed each other's caches less
    wanted = bool(measured) and measured == expected and not slowed and alone
    return wanted and passed and header["verdict"]["status"] != Status.FAIL and not header.get("unfit")


def _passed(document: Any) -> bool:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return is_baseline(document)
    return False


def _newest_passed(folder: Path) -> Path | None:
    for path in reversed(_numbered(folder)):
        with contextlib.suppress(NoBaseline):
            if _passed(_document(path)):
                return path
    return None


def write_atomically(path: Path, document: dict[str, Any] | str) -> Path:
    """Write `path`, as JSON or text, whole or not at all, over whatever was there; raises OSError where that cannot be done."""
    with _whole_file(path.parent, document) as whole:
        os.replace(whole, path)
    return path


def _write(folder: Path, name: str, document: dict[str, Any]) -> Path:
    """Write whole or not at all, under the folder's next number and never over another file."""
    folder.mkdir(parents=True, exist_ok=True)
    with _whole_file(folder, document) as whole:
        number = max(map(_number, folder.iterdir()), default=0)
        while True:
            number += 1
            path = folder / f"{number:04}_{name}.json"
            with contextlib.suppress(FileExistsError):
                os.link(whole, path)
                return path


@contextlib.contextmanager
def _whole_file(folder: Path, document: dict[str, Any] | str) -> Iterator[Path]:
    """A temporary file with the document on the disk, gone afterwards; JSON has no NaN, so neither has a document."""
    text = (
        document
        if isinstance(document, str)
        else json.dumps(document, indent=1, allow_nan=False, default=_plain)
    )
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _plain(value: object) -> object:
    """Options hold paths; pytest-benchmark keeps a test's parameters, of which ours are specs, and a user's may be anything."""
    return (
        specs.to_json(value)
        if isinstance(value, Spec)
        else str(value)
        if isinstance(value, Path)
        else repr(value)
    )
