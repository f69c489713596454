"""perf/thresholds.toml as a file: unreadable ones are refused, and lines written by hand are kept."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from ddpperf.verdict.thresholds import read_document, read_thresholds
from tests.canned import CannedSuite
from tests.project import script

BY_HAND = """# Ours: "# Made by tools/update_thresholds.py" is a line below.
[decision.gpu]  # as it is
margin=0.004

[[threshold]]
hardware = "h200x4"
test = "test_x"
speedup = 2 # Made by tools/update_thresholds.py, not so

"""


@pytest.fixture(name="file")
def thresholds_file(tmp_path: Path) -> Path:
    (tmp_path / "perf").mkdir()
    return tmp_path / "perf" / "thresholds.toml"


@pytest.fixture(name="script")
def update_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as if it were in a repository without runs."""
    module = script("update_thresholds")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_folder_of_that_name_is_refused(canned_suite: CannedSuite) -> None:
    (canned_suite.root / "perf" / "thresholds.toml").mkdir()
    canned_suite.run("perf").assert_one_sentence(
        4, "ERROR: perf/thresholds.toml cannot be read (Is a directory); make"
    )


def test_other_encoding_is_refused(canned_suite: CannedSuite) -> None:
    (canned_suite.root / "perf" / "thresholds.toml").write_bytes(b"# \xff\xfe")
    canned_suite.run("perf").assert_one_sentence(4, "ERROR: perf/thresholds.toml is not in UTF-8")


def test_perf_as_a_file_has_no_thresholds(canned_suite: CannedSuite) -> None:
    (canned_suite.root / "perf").rename(canned_suite.root / "experiments")
    (canned_suite.root / "perf").touch()
    (canned_suite.root / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    assert canned_suite.run("test_nothing.py").status == 0


def test_decision_is_read_beside_thresholds() -> None:
    document = read_document(BY_HAND)
    assert document["decision"] == {"gpu": {"margin": 0.004}}
    (one,) = read_thresholds(document)
    assert one.bounds == {"speedup": 2}
    assert read_thresholds({"decision": "judged elsewhere"}) == ()


def test_lines_written_by_hand_are_kept(script: ModuleType, file: Path) -> None:
    made = script.made(file.parents[1])
    script.main()
    assert file.read_text() == made, "no file before"
    for old in (made, "# old\n[[threshold", made + made):  # whatever the made part was, even broken
        file.write_text(BY_HAND + f"{script.MADE}: older\n" + old)
        script.main()
        assert file.read_text() == BY_HAND + made
    for end in ("", "\n"):
        file.write_text(BY_HAND.rstrip() + end)
        for _ in range(2):
            script.main()
            assert file.read_text() == f"{BY_HAND.rstrip()}\n{made}", "nothing made before"


@pytest.mark.parametrize(
    "header", ["[decision.gpu]", "[decision]  # ours", ' [ "decision".cpu ]', "[[decision]]"]
)
def test_decision_below_the_made_part_is_refused(script: ModuleType, file: Path, header: str) -> None:
    before = f"{BY_HAND}{script.made(file.parents[1])}\n{header}\n"
    file.write_text(before)
    sentence = f"{file} has {header.strip()} below the line '{script.MADE}', which is overwritten; "
    sentence += "move it above that line"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        script.main()
    assert file.read_text() == before
