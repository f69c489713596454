"""perf/thresholds.toml as a file: what cannot be read is one sentence, and what is not there is none's business."""

from __future__ import annotations

from tests.project import Project


def test_a_folder_of_that_name_is_refused(project: Project) -> None:
    (project.root / "perf" / "thresholds.toml").mkdir()
    project.run("perf").assert_one_sentence(4, "ERROR: perf/thresholds.toml cannot be read (Is a directory); make")


def test_another_encoding_is_refused(project: Project) -> None:
    (project.root / "perf" / "thresholds.toml").write_bytes(b"# \xff\xfe")
    project.run("perf").assert_one_sentence(4, "ERROR: perf/thresholds.toml is not in UTF-8")


def test_a_project_whose_perf_is_a_file_has_no_thresholds(project: Project) -> None:
    (project.root / "perf").rename(project.root / "experiments")
    (project.root / "perf").touch()
    (project.root / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    assert project.run("test_nothing.py").status == 0
