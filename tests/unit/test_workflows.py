"""Workflows, shell scripts, the pages' jobs and the Dockerfile, checked by the linters of their formats."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import REPOSITORY
from tests.workflow import ACTION, code_blocks, workflow_of_another_repository

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
ACTION_FILE = REPOSITORY / ACTION / "action.yml"
PAGE = REPOSITORY / "docs" / "nightly.md"
SCRIPTS = [
    REPOSITORY / ".ci" / "run",
    *sorted((REPOSITORY / ACTION).glob("*.sh")),
    REPOSITORY / "docs" / "slurm" / "ddpperf.sh",
]


def lint(*command: str, text: str = "", folder: Path = REPOSITORY) -> None:
    """Run a linter of this environment; it must find nothing."""
    program = Path(sys.executable).parent / command[0]
    ended = subprocess.run(
        [program, *command[1:]], input=text, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, f"{text}\n{ended.stdout}{ended.stderr}"


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all steps of the workflows and of the action, with their names."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                yield f"{path.name}: {step['name']}", step
    for step in yaml.safe_load(ACTION_FILE.read_text())["runs"]["steps"]:
        yield f"action.yml: {step['name']}", step


# --- GitHub


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_workflows_fit_their_schema(schema: str) -> None:
    assert len(WORKFLOWS) == 4
    lint("check-jsonschema", "--builtin-schema", schema, *map(str, WORKFLOWS))


def test_action_fits_its_schema() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION_FILE))


def test_workflows_are_safe() -> None:
    """Also that actions are pinned by their commits."""
    lint("zizmor", "--offline", "--quiet", "--persona=pedantic", "--strict-collection", ".github")


def test_jobs_on_gpus_keep_the_stored_runs() -> None:
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            if "gpu" in job["runs-on"]:
                assert job["steps"][0]["with"]["clean"] is False, path
                assert "fork" in job["if"] or "full_name" in job["if"], path


@pytest.mark.parametrize("job", ["gate", "nightly"])
def test_workflow_of_another_repository_fits_the_action(job: str, tmp_path: Path) -> None:
    text = workflow_of_another_repository(job)
    file = tmp_path / ".github" / "workflows" / f"{job}.yml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(file))
    checkout, action = yaml.safe_load(text)["jobs"][job]["steps"]
    assert set(action["with"]) <= set(yaml.safe_load(ACTION_FILE.read_text())["inputs"])
    used = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["test"]["steps"][0]["uses"]
    assert checkout["uses"] == used, "the page has the checkout of the workflows"


# --- other systems


def test_gitlab_job_fits_its_schema(tmp_path: Path) -> None:
    (text,) = (block for block in code_blocks(PAGE, "yaml") if "gitlab" in block)
    file = tmp_path / ".gitlab-ci.yml"
    file.write_text(text)
    transform = ("--data-transform", "gitlab-ci")
    lint("check-jsonschema", "--builtin-schema", "vendor.gitlab-ci", *transform, str(file))
    job = yaml.safe_load(text)["ddpperf"]
    assert job["allow_failure"] == {"exit_codes": [125]}
    assert job["artifacts"]["reports"]["junit"] == "results/junit.xml"
    lint("shellcheck", "--shell=bash", "-", text="\n".join(job["script"]) + "\n")


def test_dockerfile_is_sound(pytestconfig: pytest.Config) -> None:
    lint("hadolint", "Dockerfile")
    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "")
    entry, given = (
        json.loads(text.partition(f"\n{name} ")[2].splitlines()[0]) for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[:3] == ["/ddpperf/.venv/bin/python", "-m", "pytest"]
    parsed = pytestconfig._parser.parse([*entry[3:], *given], argparse.Namespace())
    assert (parsed.file_or_dir, parsed.report) == (["perf/"], "/results/report.html")


# --- shell


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path: Path) -> None:
    assert path.stat().st_mode & 0o111, "it can be run"
    lint("shellcheck", "--severity=style", str(path))


def test_steps_are_sound() -> None:
    for name, step in steps():
        if "run" in step:
            assert "${{" not in step["run"], name
            lint("shellcheck", "--shell=bash", "-", text=f"# {name}\n{step['run']}")


def test_shell_blocks_of_the_page_are_sound() -> None:
    found = code_blocks(PAGE, "sh")
    assert found
    for text in found:
        lint("shellcheck", "--shell=sh", "-", text=text)
