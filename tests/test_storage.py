"""Runs and baselines on disk: written whole under a new number, found in the right order, and read only if they are ours."""

from __future__ import annotations

import json
import math
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.plugin.storage import SCHEMA, NoBaseline, Storage, is_baseline, write_atomically
from ddpperf.results import Measured, Sample
from ddpperf.specs import AllReduceSpec
from tests.strategies import BOUNDED, measurements

KEY = "h200x4"
SPEC = AllReduceSpec(world_size=2, nbytes=1024)
MEASURED = Measured(spec=SPEC, iterations=2, samples=(Sample(set="A1", side="A", torch="2.11", seconds=((0.1, 0.2),)),))


def run_of(
    measured: dict[str, Measured] | None = None,
    *,
    outcomes: tuple[str, ...] = ("passed",),
    status: str = "PASS",
    **header: object,
) -> dict[str, Any]:
    """A run's document as far as storage reads it."""
    tests = {"perf/test_it.py::test_it": MEASURED} if measured is None else measured
    return {
        "benchmarks": [{"fullname": test, "extra_info": {"ddpperf": each.to_json()}} for test, each in tests.items()],
        "ddpperf": {
            "schema": SCHEMA,
            "hardware_key": KEY,
            "outcomes": {f"t{index}": {"outcome": outcome, "reason": ""} for index, outcome in enumerate(outcomes)},
            "verdict": {"status": status, "reasons": []},
        }
        | header,
    }


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(root=tmp_path, hardware_key=KEY)


def put(folder: Path, name: str, document: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def files_below(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


# --- writing


@BOUNDED
@given(st.dictionaries(st.text(max_size=5), measurements(), max_size=3))
def test_what_was_written_is_read_back(measured: dict[str, Measured]) -> None:
    with TemporaryDirectory() as root:
        storage = Storage(root=Path(root), hardware_key=KEY)
        path = storage.save_run(run_of(measured), "abc")
        baseline = storage.load(path)
    assert baseline.measured == measured
    assert baseline.path == path


def test_runs_and_baselines_lie_in_their_folders_under_the_next_number(storage: Storage) -> None:
    first, second = storage.save_run(run_of(), "0a1b2c3d4+"), storage.save_run(run_of(), "nogit")
    promoted = storage.promote(run_of(), "main")
    assert first.parent == second.parent == storage.root / ".ddpperf" / "runs" / KEY
    assert first.name.startswith("0001_0a1b2c3d4+_")
    assert second.name.startswith("0002_nogit_")
    assert promoted == storage.root / "perf" / "baselines" / KEY / "0001_main.json"
    assert promoted.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("present", "following"), [("0007_x.json", "0008_y.json"), ("9999_x.json", "10000_y.json"), ("x.json", "0001_y.json")]
)
def test_the_next_number_follows_the_largest(storage: Storage, present: str, following: str) -> None:
    put(storage.baselines, present, {})
    put(storage.baselines, "0003_w.json", {}) if present[0] != "x" else None
    assert storage.promote(run_of(), "y").name == following


def test_nothing_is_ever_overwritten(storage: Storage) -> None:
    """Many at once under one name: each finds a number of its own, and what it wrote."""
    writers, writes = 8, 10
    together = threading.Barrier(writers)

    def write(writer: int) -> dict[Path, int]:
        written = {}
        for index in range(writes):
            together.wait()
            mark = writer * writes + index
            written[storage.promote({"mark": mark}, "main")] = mark
        return written

    with ThreadPoolExecutor(writers) as pool:
        written = [item for each in pool.map(write, range(writers)) for item in each.items()]
    assert len({path for path, _ in written}) == writers * writes
    assert all(json.loads(path.read_text()) == {"mark": mark} for path, mark in written)
    assert files_below(storage.root) == sorted(path.name for path, _ in written)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


WRITES: list[Callable[[Storage, dict[str, Any]], Path]] = [
    lambda storage, document: storage.save_run(document, "abc"),
    lambda storage, document: storage.promote(document, "main"),
    lambda storage, document: write_atomically(storage.root / "copy.json", document),
]


@pytest.mark.parametrize("write", WRITES, ids=["save_run", "promote", "write_atomically"])
def test_what_cannot_be_written_whole_leaves_no_file(storage: Storage, write: Callable[..., Path]) -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(storage, run_of() | {"mean": value})
    with pytest.raises(TypeError, match=r"PosixPath\('x'\) is no JSON value"):
        write(storage, run_of() | {"path": Path("x")})
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        write(storage, run_of() | {"long": "x" * 100_000})
    assert files_below(storage.root) == []


@pytest.mark.parametrize("write", WRITES, ids=["save_run", "promote", "write_atomically"])
def test_only_the_whole_file_is_left(storage: Storage, write: Callable[..., Path]) -> None:
    path = write(storage, run_of())
    assert files_below(storage.root) == [path.name]
    assert json.loads(path.read_text()) == json.loads(json.dumps(run_of()))


def test_a_copy_replaces_what_was_there_only_when_it_is_whole(tmp_path: Path) -> None:
    path = put(tmp_path, "copy.json", {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_atomically(path, {"new": math.nan})
    assert json.loads(path.read_text()) == {"old": 1}
    write_atomically(path, {"new": 1})
    assert json.loads(path.read_text()) == {"new": 1}
    assert files_below(tmp_path) == ["copy.json"]


def test_a_folder_that_cannot_be_is_an_os_error(storage: Storage) -> None:
    (storage.root / ".ddpperf").write_text("a file in the folder's place")
    with pytest.raises(OSError, match="Not a directory"):
        storage.save_run(run_of(), "abc")


def test_a_spec_among_a_tests_parameters_is_written_as_json(storage: Storage) -> None:
    path = storage.promote(run_of() | {"params": {"spec": SPEC}}, "main")
    assert json.loads(path.read_text())["params"]["spec"]["nbytes"] == 1024


# --- finding


def test_a_bare_compare_takes_the_newest_promoted(storage: Storage) -> None:
    put(storage.runs, "0009_run.json", run_of())
    put(storage.baselines, "0001_old.json", run_of())
    newest = put(storage.baselines, "0002_new.json", run_of())
    assert storage.find(True) == newest


def test_numbers_are_ordered_as_numbers(storage: Storage) -> None:
    newest = put(storage.baselines, "10000_a.json", run_of())
    put(storage.baselines, "9999_z.json", run_of())
    assert storage.find(True) == newest


@pytest.mark.parametrize(
    "newer",
    [
        run_of(outcomes=("passed", "failed")),
        run_of(outcomes=("passed", "not run")),
        run_of(outcomes=("skipped",)),
        run_of(outcomes=()),
        run_of(status="FAIL"),
        {"ddpperf": {"outcomes": None, "verdict": {"status": "PASS"}}},
        {},
        [],
        None,
    ],
    ids=["failed", "not run", "skipped", "empty", "slower", "damaged", "foreign", "list", "null"],
)
def test_a_bare_compare_without_a_promoted_one_takes_the_newest_good_run(storage: Storage, newer: object) -> None:
    put(storage.runs, "0001_good.json", run_of())
    good = put(storage.runs, "0002_good.json", run_of(outcomes=("passed", "skipped"), status="NO VERDICT"))
    put(storage.runs, "0003_bad.json", newer)
    (storage.runs / "0004_broken.json").write_text('{"ddpperf": ')
    (storage.runs / "0005_binary.json").write_bytes(b"\xff\xfe")
    (storage.runs / "0006_folder.json").mkdir()
    assert storage.find(True) == good


def test_files_without_a_number_are_no_baselines(storage: Storage) -> None:
    put(storage.baselines, "README.json", run_of())
    put(storage.baselines, "0001_x.json.tmp", run_of())
    put(storage.baselines, "12_x.json", run_of())
    with pytest.raises(NoBaseline, match="holds a run that passed"):
        storage.find(True)


def test_without_a_baseline_it_is_said_how_to_save_one(storage: Storage) -> None:
    with pytest.raises(NoBaseline, match=r"^no baseline for h200x4: .*; save one with --benchmark-save=NAME, then compare$"):
        storage.find(True)


def test_another_hardwares_baseline_is_not_found(storage: Storage) -> None:
    Storage(root=storage.root, hardware_key="h200x8").promote(run_of(), "main")
    with pytest.raises(NoBaseline, match="no baseline for h200x4"):
        storage.find(True)


def test_a_baseline_is_found_by_path_number_and_name(storage: Storage, tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "other", "mine.json", run_of())
    promoted = put(storage.baselines, "0001_main.json", run_of())
    run = put(storage.runs, "0002_abc.json", run_of(outcomes=("failed",)))
    assert storage.find(str(elsewhere)) == elsewhere
    assert storage.find("0001") == promoted
    assert storage.find("0001_ma") == promoted
    assert storage.find("0002") == run  # asked for by name, it need not have passed


@pytest.mark.parametrize("wanted", ["0003", "main", "perf/", "missing.json", "x" * 5000])
def test_an_unknown_name_is_refused(storage: Storage, wanted: str) -> None:
    put(storage.baselines, "0001_main.json", run_of())
    with pytest.raises(NoBaseline, match=r"is neither a file nor begins a name in .*put it last$"):
        storage.find(wanted)


# --- reading


def damaged(**change: object) -> dict[str, Any]:
    return run_of() | {"benchmarks": [{"fullname": "t", "extra_info": {"ddpperf": MEASURED.to_json() | change}}]}


def with_counters(counters: object) -> dict[str, Any]:
    sample = {"set": "A1", "side": "A", "torch": "2.11", "seconds": [[0.1]], "counters": counters}
    return damaged(samples=[sample])


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({}, r"was not saved by ddpperf .*; name a file below"),
        ([], r"was not saved by ddpperf .*; name a file below"),
        (None, r"was not saved by ddpperf .*; name a file below"),
        ({"benchmarks": []}, r"was not saved by ddpperf \(no 'ddpperf'\); name a file below"),
        ({"ddpperf": []}, r"was not saved by ddpperf .*; name a file below"),
        ({"ddpperf": {"schema": SCHEMA}}, r"was not saved by ddpperf \(no 'hardware_key'\); name a file below"),
        (run_of(schema=SCHEMA + 1), rf"has schema {SCHEMA + 1}, this ddpperf reads {SCHEMA}; save a baseline anew$"),
        (run_of(hardware_key="h200x8"), r"was measured on h200x8, this is h200x4; save a baseline here$"),
        ({"ddpperf": run_of()["ddpperf"]}, r"is damaged \(KeyError\('benchmarks'\)\)"),
        (run_of() | {"benchmarks": [{"fullname": "t", "extra_info": {}}]}, r"is damaged \(KeyError\('ddpperf'\)\)"),
        (run_of() | {"benchmarks": None}, r"is damaged \(TypeError"),
        (damaged(spec={"measurement": "broadcast"}), r"is damaged \(ValueError\(.*'broadcast'"),
        (damaged(samples=[]), r"is damaged"),
        (damaged(iterations=0), r"is damaged"),
        (with_counters([0.5]), r"is damaged"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_with_gives_one_sentence(storage: Storage, document: object, sentence: str) -> None:
    path = put(storage.runs, "0001_x.json", document)
    with pytest.raises(NoBaseline, match=sentence) as refusal:
        storage.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "content", [b"", b'{"ddpperf": ', b"\xff\xfe\x00", b"[" * 100_000], ids=["empty", "cut", "binary", "deep"]
)
def test_an_unreadable_file_gives_one_sentence(storage: Storage, content: bytes) -> None:
    path = put(storage.runs, "0001_x.json", {})
    path.write_bytes(content)
    with pytest.raises(NoBaseline, match=r"^the baseline .*0001_x.json cannot be read \(.*\); name another, or save one anew$"):
        storage.load(path)


def test_a_missing_file_gives_one_sentence(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(NoBaseline, match=r"cannot be read \(.*No such file or directory.*\)"):
        storage.load(tmp_path / "gone.json")
    with pytest.raises(NoBaseline, match=r"cannot be read \(.*Is a directory.*\)"):
        storage.load(tmp_path)


def test_a_duration_that_is_nan_is_damage(storage: Storage) -> None:
    document = damaged(samples=[{"set": "A1", "side": "A", "torch": "2.11", "seconds": [[math.nan]], "counters": {}}])
    path = put(storage.runs, "0001_x.json", document)
    assert "NaN" in path.read_text()
    with pytest.raises(NoBaseline, match=r"is damaged .*which is no duration"):
        storage.load(path)


# --- what may be a baseline


@pytest.mark.parametrize(
    ("outcomes", "status", "good"),
    [
        (("passed",), "PASS", True),
        (("passed", "passed", "skipped"), "PASS", True),
        (("passed",), "NO VERDICT", True),  # the first run of all has nothing to compare with
        (("passed",), "FAIL", False),
        (("passed", "failed"), "FAIL", False),
        (("passed", "not run"), "NO VERDICT", False),
        (("skipped",), "NO VERDICT", False),
        ((), "NO VERDICT", False),
    ],
)
def test_a_baseline_is_a_run_whose_tests_all_passed(outcomes: tuple[str, ...], status: str, good: bool) -> None:
    assert is_baseline(run_of(outcomes=outcomes, status=status)) == good
