"""Hostile files and options: each is accepted, or refused in one sentence of at most 300 letters.

The short run is part of `make test`, the long one of `make test-all`. The long run by itself:

    python -m pytest tests/fuzz -m slow
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from ddpperf.data import decode
from ddpperf.errors import CannotTrain, Refused
from ddpperf.plugin.options.option_table import NOTHING, OPTIONS
from ddpperf.report import __main__ as report
from ddpperf.results.stored_runs import NoBaseline, Storage
from ddpperf.specs import RunSpec, from_json, to_json
from ddpperf.training import checkpoint
from ddpperf.verdict.settings import NAME, read_decision
from ddpperf.verdict.stored_run_comparison import Reference, compare, negative_control
from ddpperf.verdict.thresholds import read_document, read_threshold_file, read_thresholds
from perf.common import recipes
from tests.command_line import reader
from tests.fuzz.fuzzing import BOTH, HOSTILE, as_bytes, damaged_bytes, fuzz, mutations, require_sentence
from tests.project import REPOSITORY

KEY = "cpu2-epyc-25-17-1"
COMMITTED = REPOSITORY / "perf" / "baselines" / KEY / "0014_core.json"


def require_refusal(read: Callable[[], object], refusal: type[Exception], *hidden: object) -> bool:
    """Return whether a function returns; require that it otherwise raises a refusal of one sentence."""
    try:
        read()
    except refusal as error:
        if type(error) is not refusal:  # a UnicodeError is a ValueError, but no refusal
            raise
        require_sentence(error, *hidden)
        return False
    return True


def small_run() -> dict[str, Any]:
    """A stored run with one test of each kind of measurement, and with two rounds of each."""
    document: dict[str, Any] = json.loads(COMMITTED.read_text())
    of_kinds = {
        benchmark["extra_info"]["ddpperf"]["spec"]["measurement"]: benchmark
        for benchmark in document["benchmarks"]
    }
    for benchmark in of_kinds.values():
        del benchmark["stats"]["data"]  # the times again
        ours = benchmark["extra_info"]["ddpperf"]
        for measured in (ours, *ours["references"].values()):
            for sample in measured["samples"]:
                del sample["seconds"][2:]
    tests = {benchmark["fullname"] for benchmark in of_kinds.values()}
    header = document["ddpperf"]
    header["outcomes"] = {test: outcome for test, outcome in header["outcomes"].items() if test in tests}
    header["timing"]["test_seconds"] = dict.fromkeys(sorted(tests), 1.0)
    return document | {"benchmarks": [*of_kinds.values()]}


def mutated_runs() -> st.SearchStrategy[bytes]:
    run = small_run()
    return mutations(run).map(as_bytes) | mutations(run).map(as_bytes) | damaged_bytes(as_bytes(run))


@BOTH
def test_stored_run_is_read_or_refused(profile: str, tmp_path: Path) -> None:
    """What is read can also be compared with."""
    storage, path = Storage(root=tmp_path, hardware_key=KEY), tmp_path / "0001_x.json"
    settings = read_threshold_file(REPOSITORY)[1]["cpu"]
    path.write_bytes(as_bytes(small_run()))
    whole = storage.load(path)

    def read() -> None:
        found = storage.load(path)
        reference = Reference(baseline=found, settings=settings, device="cpu", history=storage.history(found))
        compared = compare(whole.measured, reference, [*whole.measured])
        negative_control(whole.copied, reference, compared=len(compared.changes))
        json.dumps(compared.to_json(), allow_nan=False)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        require_refusal(read, NoBaseline, path, storage.runs)

    fuzz(profile, mutated_runs(), check, short=150, long=20_000)


@BOTH
def test_report_of_a_run_is_made_or_refused(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0001_x.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", str(path)])

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with (
            contextlib.redirect_stderr(io.StringIO()) as errors,
            contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())),
        ):
            status = report.main()
        if status:
            require_sentence(errors.getvalue().removesuffix("\n"), path)
        else:
            assert not errors.getvalue()

    fuzz(profile, mutated_runs(), check, short=30, long=2000)


@BOTH
def test_thresholds_are_read_or_refused(profile: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.parent.mkdir()
    whole = (REPOSITORY / NAME).read_bytes()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        require_refusal(lambda: read_threshold_file(tmp_path), Refused)

    fuzz(profile, damaged_bytes(whole), check, short=40, long=2000)


@BOTH
def test_parsed_thresholds_are_read_or_refused(profile: str) -> None:
    document = read_document((REPOSITORY / NAME).read_text())
    document["threshold"] = document["threshold"][:5]

    def check(changed: Any) -> None:
        if isinstance(changed, dict):  # as all of TOML
            require_refusal(lambda: (read_thresholds(changed), read_decision(changed)), ValueError)

    fuzz(profile, mutations(document), check, short=100, long=2000)


@BOTH
def test_recipes_are_read_or_refused(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: (recipes.FOLDER / name).read_bytes() for name in ("recipes.toml", "recipes.json")}
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)

    def check(contents: tuple[bytes, bytes]) -> None:
        for name, content in zip(whole, contents, strict=True):
            (tmp_path / name).write_bytes(content)
        for kind in recipes.KINDS:
            require_refusal(lambda kind=kind: recipes.read_recipes("cuda", kind), ValueError)  # type: ignore[misc]

    toml, tuned = (st.just(content) | damaged_bytes(content) for content in whole.values())
    fuzz(profile, st.tuples(toml, tuned), check, short=30, long=1000)


@BOTH
def test_image_is_decoded_or_refused(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    contents = []
    for kind in (*decode.FORMATS, "GIF", "EPS", "PCX"):
        file = io.BytesIO()
        Image.effect_noise((9, 7), 50).convert("RGB").save(file, format=kind)
        contents.append(file.getvalue())

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow
            require_refusal(lambda: decode.load(str(path)), Refused, path)

    inputs = st.one_of(*map(damaged_bytes, contents), st.binary(max_size=40))
    fuzz(profile, inputs, check, short=200, long=5000)


@BOTH
def test_checkpoint_is_read_or_refused(profile: str, tmp_path: Path) -> None:
    """With a right checksum, as somebody would write who wants the file to be read."""
    path, spec = tmp_path / "x.pt", {"model": "resnet18", "seed": 1}
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "history": [{"loss": 1.0}]}
    checkpoint.save(path, spec, state)
    whole = path.read_bytes().partition(checkpoint.LABEL)[0]

    def check(content: bytes) -> None:
        path.write_bytes(content + checkpoint.LABEL + hashlib.sha256(content).hexdigest().encode())
        require_refusal(lambda: checkpoint.load(path, spec, torch.device("cpu")), CannotTrain, path)

    fuzz(profile, damaged_bytes(whole), check, short=100, long=2000)


@BOTH
def test_spec_is_read_or_refused(profile: str) -> None:
    """As it comes in a message or in a stored run; what is read is written as it was."""
    spec = RunSpec(
        world_size=2,
        strategy="ddp",
        input="device",
        per_rank_batch_size=8,
        grow_from=2,
        epochs=3,
        test_images=8,
        rate=0.1,
    )

    def check(fields: Any) -> None:
        if isinstance(fields, dict):
            require_refusal(lambda: (from_json(fields).id, to_json(from_json(fields))), ValueError)

    fuzz(profile, mutations(to_json(spec)), check, short=200, long=5000)


def arguments() -> st.SearchStrategy[list[str]]:
    texts = [value for value in HOSTILE if isinstance(value, str) and "\0" not in value]
    examples = [option.parser.example for option in OPTIONS.values()]
    value = st.sampled_from([*examples, *texts]) | st.text(max_size=30)
    names = st.sampled_from([name for name, option in OPTIONS.items() if option.parser is not NOTHING])
    flags = st.sampled_from([name for name, option in OPTIONS.items() if option.parser is NOTHING])
    return st.lists(st.tuples(names, value).map("=".join) | flags, min_size=1, max_size=4)


@BOTH
def test_options_are_read_or_refused(profile: str, pytestconfig: pytest.Config) -> None:
    read = reader(pytestconfig)

    def check(given: list[str]) -> None:
        for gpus in (0, 2):
            require_refusal(lambda gpus=gpus: read(*given, gpus=gpus), Refused)  # type: ignore[misc]

    fuzz(profile, arguments(), check, short=100, long=5000)


def test_longest_values_of_options_are_refused_in_short_sentences(pytestconfig: pytest.Config) -> None:
    """Each letter of the values is written as an escape of up to ten letters."""
    read = reader(pytestconfig)
    for name, option in OPTIONS.items():
        for letter in ("\x1f", "\U00018d09", "'"):
            value = f"{name}={letter * 200}"
            if option.parser is not NOTHING:
                require_refusal(lambda value=value: read(value, gpus=0), Refused)  # type: ignore[misc]
