"""Run a job of a GitHub workflow on this machine: its expressions, its steps and its composite action."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fake_gh import REPOSITORY_NAME
from tests.project import HANG_SECONDS, REPOSITORY

EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
# The parts of an expression that Python writes in another way: functions, names of a context, operators.
NAMES = re.compile(r"'[^']*'|(\w+)\(\)|[A-Za-z_][\w.-]*|&&|\|\||!(?!=)")
OPERATORS = {"&&": " and ", "||": " or ", "!": " not "}
ACTION = ".github/actions/ddpperf"
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]  # as GitHub runs `shell: bash`


@dataclass
class Finished:
    """A finished job: "success", "failure" or "skipped", what it printed and what it left."""

    conclusion: str = "success"
    log: str = ""
    summary: str = ""
    ran: list[str] = field(default_factory=list)  # the names of the steps
    artifacts: dict[str, list[str]] = field(default_factory=dict)  # names of files

    def __repr__(self) -> str:
        return f"{self.conclusion}: {', '.join(self.ran)}\n{self.log}"


@dataclass(kw_only=True)
class Runner:
    """A self-hosted runner whose checkout is a scratch repository.

    variables: the environment of its processes. temp: the folder that is empty at the start of a job.
    github: more of the context `github`. settings: the repository's variables. finished: the last job.
    """

    workspace: Path
    temp: Path
    variables: Mapping[str, str]
    github: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    finished: Finished = field(default_factory=Finished)

    def run(self, workflow: str | Mapping[str, Any], job: str) -> Finished:
        """Run a job of a workflow in .github/workflows/, or of a workflow's content."""
        content = self.content(workflow) if isinstance(workflow, str) else workflow
        definition, event = content["jobs"][job], self.github.get("event", {})
        self.temp.mkdir(exist_ok=True)
        summary = self.temp / "summary.md"
        summary.touch()
        github = {"repository": REPOSITORY_NAME, "job": job, "token": "", "sha": "0" * 40, **self.github}
        runner = {"environment": "self-hosted"}
        context = {"github": github, "vars": self.settings, "runner": runner, "steps": {}}
        self.finished = Finished()
        if not condition(definition.get("if", "success()"), context, "success"):
            return Finished(conclusion="skipped")
        variables = {
            **self.variables,
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_EVENT_NAME": "pull_request" if "pull_request" in event else "schedule",
            "GITHUB_JOB": job,
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKFLOW": content["name"],
            "RUNNER_TEMP": str(self.temp),
            "RUNNER_TOOL_CACHE": str(self.workspace.parent / "tools"),
            **filled(definition.get("env", {}), context),
        }
        self._run_steps(definition["steps"], context, variables)
        self.finished.summary = summary.read_text()
        return self.finished

    def content(self, workflow: str) -> dict[str, Any]:
        return dict(yaml.safe_load((self.workspace / ".github" / "workflows" / workflow).read_text()))

    def _run_steps(
        self, steps: list[dict[str, Any]], context: dict[str, Any], variables: Mapping[str, str]
    ) -> None:
        for step in steps:
            if not condition(step.get("if", "success()"), context, self.finished.conclusion):
                continue
            name = step.get("name", step.get("uses", ""))
            self.finished.ran.append(name)
            given = {**variables, **filled(step.get("env", {}), context)}
            if "uses" in step:
                inputs = filled(step.get("with", {}), context)
                outputs = self._use(step["uses"], inputs, context, given)
            else:
                outputs = self._shell(step["run"], given)
            context["steps"][step.get("id", name)] = {"outputs": outputs}

    def _shell(self, script: str, variables: Mapping[str, str]) -> dict[str, str]:
        file, output = self.temp.parent / "step.sh", self.temp.parent / "output"
        file.write_text(script)
        output.write_text("")
        ended = subprocess.run(
            [*BASH, str(file)],
            cwd=self.workspace,
            env={**variables, "GITHUB_OUTPUT": str(output)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
        )
        self.finished.log += ended.stdout
        if ended.returncode:
            self.finished.conclusion = "failure"
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _use(
        self, action: str, inputs: Mapping[str, str], context: Mapping[str, Any], variables: Mapping[str, str]
    ) -> dict[str, str]:
        """Run the composite action; stand in for the actions of GitHub."""
        name, _, _ = action.partition("@")
        if name == "actions/checkout":  # the scratch repository is checked out
            return {}
        if name == "actions/upload-artifact":
            files = (path.name for path in Path(inputs["path"]).rglob("*") if path.is_file())
            self.finished.artifacts[inputs["name"]] = sorted(files)
            return {}
        assert name.endswith(ACTION), action
        # Another repository gets the action with the rest of ddpperf, in a folder of the runner.
        folder = (self.workspace if name.startswith("./") else REPOSITORY) / ACTION
        definition = yaml.safe_load((folder / "action.yml").read_text())
        assert set(inputs) <= set(definition["inputs"]), inputs
        defaults = {key: given["default"] for key, given in definition["inputs"].items()}
        inner = {**context, "inputs": {**filled(defaults, context), **inputs}, "steps": {}}
        given = {**variables, "GITHUB_ACTION_PATH": str(folder)}
        self._run_steps(definition["runs"]["steps"], inner, given)
        return filled({key: output["value"] for key, output in definition["outputs"].items()}, inner)


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a Markdown page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def workflow_of_another_repository(job: str) -> str:
    """Return a documented workflow, with a repository and a commit in place of the words to replace."""
    blocks = code_blocks(REPOSITORY / "docs" / "nightly.md", "yaml")
    (text,) = (block for block in blocks if "OWNER/ddpperf" in block and f"\n  {job}:\n" in block)
    return text.replace("OWNER", "team").replace("COMMIT", "0" * 40)


def condition(text: str, context: Mapping[str, Any], conclusion: str) -> bool:
    """Return whether a step or job with this `if` runs; without a status function, success() is meant."""
    found = EXPRESSION.fullmatch(text.strip())
    expression = found[1] if found else text
    if not re.search(r"\b(success|failure|always)\(\)", expression):
        expression = f"success() && ({expression})"
    return bool(evaluated(expression, context, conclusion))


def filled(values: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as texts, with each ${{ }} replaced by the value of its expression."""

    def text(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return {
        key: EXPRESSION.sub(lambda found: text(evaluated(found[1], context)), text(value))
        for key, value in values.items()
    }


def evaluated(expression: str, context: Mapping[str, Any], conclusion: str = "success") -> Any:
    """Return the value of an expression of GitHub; a missing name is an empty text."""

    def python(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith("'"):
            return word
        if found[1]:
            return str(found[1] in (conclusion, "always"))
        if word in OPERATORS:
            return OPERATORS[word]
        value: Any = context
        for part in word.split("."):
            value = value.get(part, "") if isinstance(value, Mapping) else ""
        return repr(value)

    return eval(NAMES.sub(python, expression.strip()))
