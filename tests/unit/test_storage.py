"""Stored runs: written whole, found by name, and refused if damaged."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.io.files import write_atomically
from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import SCHEMA, NoBaseline, Storage, is_baseline, to_json
from ddpperf.specs import AllReduceSpec
from tests.generated import BOUNDED, PRINTABLE, measurements
from tests.project import full_disk

KEY = "h200x4"
SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def measured(seconds: float) -> Measured:
    sample = Sample(set="A1", side="A", torch="2.11", seconds=((seconds, 2 * seconds),))
    return Measured(spec=SPEC, iterations=2, samples=(sample,))


MEASURED = measured(0.1)


def run_of(
    measured: Mapping[str, Measured] | None = None,
    *,
    status: str = "PASS",
    when: str = "",
    header: Mapping[str, Any] | None = None,
    **outcomes: str,
) -> dict[str, Any]:
    """A run's document as far as storage reads it; by default one test `t` passed."""
    tests = {"t": MEASURED} if measured is None else measured
    kinds = outcomes or {"t": "passed"}
    return {
        "benchmarks": [
            {"fullname": test, "extra_info": {"ddpperf": found.to_json()}} for test, found in tests.items()
        ],
        "ddpperf": {
            "schema": SCHEMA,
            "hardware_key": KEY,
            "outcomes": {test: {"kind": kind, "reason": ""} for test, kind in kinds.items()},
            "verdict": {"status": status, "reasons": []},
            **(header or {}),
        },
        "datetime": when,
    }


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(root=tmp_path, hardware_key=KEY)


def put(folder: Path, name: str, document: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(document))
    return folder / name


def files_below(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@BOUNDED
@given(st.dictionaries(st.text(PRINTABLE, max_size=5), measurements(), min_size=1, max_size=3))
def test_what_was_written_is_read_back(measured: dict[str, Measured]) -> None:
    with TemporaryDirectory() as root:
        storage = Storage(root=Path(root), hardware_key=KEY)
        path = storage.save_run(run_of(measured), "abc")
        assert storage.load(path).measured == measured


def test_runs_and_baselines_get_the_next_number(storage: Storage) -> None:
    first, second = (storage.save_run(run_of(), commit) for commit in ("0a1b2c3d4+", "nogit"))
    promoted = storage.promote(run_of(), "main")
    assert first.parent == second.parent == storage.root / ".ddpperf" / "runs" / KEY
    assert first.name.startswith("0001_0a1b2c3d4+_")
    assert second.name.startswith("0002_nogit_")
    assert promoted == storage.root / "perf" / "baselines" / KEY / "0001_main.json"


def test_saved_files_follow_the_umask(storage: Storage) -> None:
    before = os.umask(0o027)
    try:
        written = [storage.promote(run_of(), "main"), write_atomically(storage.root / "page.html", "page")]
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in written} == {oct(0o640)}


def test_nothing_is_ever_overwritten(storage: Storage) -> None:
    """Each of several simultaneous writers finds a number of its own."""
    writers = 8
    together = threading.Barrier(writers)

    def write(mark: int) -> Path:
        together.wait()
        return storage.promote({"mark": mark}, "main")

    with ThreadPoolExecutor(writers) as pool:
        written = list(pool.map(write, range(writers)))
    assert [json.loads(path.read_text()) for path in written] == [{"mark": mark} for mark in range(writers)]
    assert files_below(storage.root) == sorted(path.name for path in written)


WRITES: list[Callable[[Storage, dict[str, Any]], Path]] = [
    lambda storage, document: storage.save_run(document, "abc"),
    lambda storage, document: storage.promote(document, "main"),
    lambda storage, document: write_atomically(storage.root / "copy.json", to_json(document)),
]


@pytest.mark.parametrize("write", WRITES, ids=["save_run", "promote", "write_atomically"])
def test_the_whole_file_is_left_or_none(storage: Storage, write: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(storage, run_of() | {"mean": math.nan})
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(storage, run_of() | {"long": "x" * 100_000})
    assert files_below(storage.root) == []
    path = write(storage, run_of())
    assert files_below(storage.root) == [path.name]
    assert storage.load(path).measured == {"t": MEASURED}


def test_bare_compare_takes_the_newest_promoted(storage: Storage) -> None:
    put(storage.runs, "90000_run.json", run_of())
    for name in ("10000_a.json", "9999_z.json"):
        put(storage.baselines, name, run_of())
    assert storage.find(True).name == "10000_a.json"


def test_bare_compare_takes_the_newest_passed_run(storage: Storage) -> None:
    put(storage.runs, "0001_good.json", run_of())
    good = put(storage.runs, "0002_good.json", run_of(t="passed", u="skipped", status="NO VERDICT"))
    no_outcomes = {"benchmarks": [], "ddpperf": {"outcomes": None, "verdict": {"status": "PASS"}}}
    bads: list[object] = [run_of(t="failed"), run_of({}), no_outcomes, {}, [], None]
    for number, bad in enumerate(bads, start=3):
        put(storage.runs, f"{number:04}_bad.json", bad)
    (storage.runs / "0011_binary.json").write_bytes(b"\xff\xfe")
    (storage.runs / "0012_folder.json").mkdir()
    assert storage.find(True) == good


def test_missing_baseline_advises_how_to_save_one(storage: Storage) -> None:
    Storage(root=storage.root, hardware_key="h200x8").promote(run_of(), "main")
    for no_number in ("README.json", "0001_x.json.tmp", "12_x.json"):
        put(storage.baselines, no_number, run_of())
    with pytest.raises(
        NoBaseline, match=r"^no baseline for h200x4: .*; save one with --benchmark-save=NAME, then compare$"
    ):
        storage.find(True)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("1", "0001_main.json"), ("10000", "10000_b.json"), ("main", "0002_main.json"),
     ("0001_ma", "0001_main.json"), ("0003", "0003_abc_20260101.json")],
)  # fmt: skip
def test_file_is_found_by_number_or_name(storage: Storage, wanted: str, found: str) -> None:
    """The newest of a name, a baseline before a run. A run that is named need not have passed."""
    for name in ("0001_main.json", "0002_main.json", "10000_b.json"):
        put(storage.baselines, name, run_of())
    put(storage.runs, "0001_run.json", run_of())
    assert storage.find(str(elsewhere := put(storage.root, "mine.json", run_of()))) == elsewhere
    put(storage.runs, "0003_abc_20260101.json", run_of(t="failed"))
    assert storage.find(wanted).name == found


def test_two_files_with_one_number_are_told_apart(storage: Storage) -> None:
    """As a merge of two branches leaves them."""
    for name, day in (("0003_theirs.json", "2026-11-02"), ("0003_zz_ours.json", "2026-11-01")):
        put(storage.baselines, name, run_of(when=f"{day}T00:00:00+00:00"))
    assert storage.find(True).name == "0003_theirs.json", "the newer one"
    newest = storage.newest_baseline()
    assert newest is not None
    assert newest.path.name == "0003_theirs.json"
    words = "^--benchmark-compare=3 fits 0003_theirs.json and 0003_zz_ours.json; name one of these files"
    with pytest.raises(NoBaseline, match=words):
        storage.find("3")
    assert storage.find("theirs").name == "0003_theirs.json"


@pytest.mark.parametrize("name", ["20261128", "v1.json"])
def test_any_name_finds_its_file(storage: Storage, name: str) -> None:
    path = storage.promote(run_of(), name)
    assert storage.find(name) == path


def test_file_system_without_hard_links_stores_runs(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, place: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    paths = [storage.promote(run_of(), "main") for _ in range(2)]
    assert [path.name for path in paths] == ["0001_main.json", "0002_main.json"]
    assert storage.load(paths[1]).measured.keys() == {"t"}
    assert set(storage.baselines.iterdir()) == set(paths)


@pytest.mark.parametrize("wanted", ["1000", "ain", "missing.json"])
def test_an_unknown_name_is_refused(storage: Storage, wanted: str) -> None:
    put(storage.baselines, "0001_main.json", run_of())
    put(storage.baselines, "10000_b.json", run_of())
    with pytest.raises(NoBaseline, match=r"is neither a file nor the number or name of one in .*these$"):
        storage.find(wanted)


def test_compressed_run_is_read_if_it_is_whole(storage: Storage) -> None:
    path, content = storage.root / "mine.json.gz", gzip.compress(json.dumps(run_of()).encode())
    path.write_bytes(content)
    assert storage.load(storage.find(str(path))).measured.keys() == {"t"}
    path.write_bytes(content[:40])
    with pytest.raises(NoBaseline, match=r"cannot be read .Compressed file ended .*; name another"):
        storage.load(path)


def damaged(**change: object) -> dict[str, Any]:
    return run_of() | {
        "benchmarks": [{"fullname": "t", "extra_info": {"ddpperf": MEASURED.to_json() | change}}]
    }


def damaged_sample(**change: object) -> dict[str, Any]:
    return damaged(samples=[MEASURED.to_json()["samples"][0] | change])


def other(**header: object) -> dict[str, Any]:
    return run_of(header=header)


NOT_SAVED = r"was not saved by ddpperf; name a file in \.ddpperf/runs or perf/baselines$"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, NOT_SAVED),
        ([], NOT_SAVED),
        ({"ddpperf": 1}, NOT_SAVED),
        (other(schema=SCHEMA + 1), rf"has schema {SCHEMA + 1}, this ddpperf reads 2 and {SCHEMA}; measure"),
        (other(schema=2, against=7), r"is damaged \(TypeError\("),
        (other(hardware_key=7), r"is damaged \(its hardware_key is 7\); name another run$"),
        (other(hardware_key="h200x8"), r"was measured on h200x8, this is h200x4; save a baseline here$"),
        ({"ddpperf": run_of()["ddpperf"]}, r"is damaged \(KeyError\('benchmarks'\)\); name another"),
        (damaged(spec={"measurement": "broadcast"}), r"is damaged \(ValueError\(.*'broadcast'"),
        (b"<<<<<<< HEAD\n{}", r"cannot be read \(it has conflict markers of a merge\); name another"),
        (b"version https://git-lfs.github.com/spec/v1", r"\(it is a pointer of Git LFS, whose file git lfs"),
        (damaged_sample(seconds=[[math.nan]]), r"cannot be read \(NaN is no number\); name"),
        (damaged_sample(seconds=[[-1.0]]), r"is damaged .*no duration"),
        (other(environment={"commit": "--output=x"}), r"is damaged \(ValueError\(.* is no commit"),
        (run_of() | {"benchmarks": 2 * run_of()["benchmarks"]}, r"has the test t twice; name another"),
        (run_of({}), r"holds no measured test; name another, or save one anew$"),
        (other(judged={}), r"is an A/B run, which has two versions of each time; name another run$"),
        *((text, r"cannot be read \(.*\); name another, or save one anew$")
          for text in (b"", b'{"', b"\xff", b"[" * 100_000)),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_with_gives_one_sentence(
    storage: Storage, content: object, sentence: str
) -> None:
    path = storage.root / "0001_x.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(NoBaseline, match=sentence) as refusal:
        storage.load(path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value).replace(str(path), "0001_x.json")) < 300


@pytest.mark.parametrize(
    ("run", "good"),
    [
        (run_of({"t": MEASURED, "u": MEASURED}, t="passed", u="passed", v="skipped"), True),
        (run_of(t="passed", status="NO VERDICT"), True),  # the first run of all has nothing to compare with
        (run_of(t="passed", status="FAIL"), False),
        (run_of(t="passed", u="failed"), False),
        (run_of(t="passed", u="not run", status="NO VERDICT"), False),
        (other(unfit=["t is slower"]), False),  # beside a control that failed
        (run_of({}, t="passed", status="NO VERDICT"), False),  # benchmarks were disabled
        (other(judged={}), False),  # base and candidate evict each other's caches
        (damaged(spec=MEASURED.to_json()["spec"] | {"delay_seconds": 0.1}), False),
        ({"ddpperf": None}, False),
        (run_of(t="passed", u="passed", status="NO VERDICT"), False),  # one test measured nothing
    ],
)  # fmt: skip
def test_baseline_needs_all_tests_measured_and_passed(run: dict[str, Any], good: bool) -> None:
    assert is_baseline(run) == good
