"""Run a job of a GitHub workflow on this machine: its expressions, its steps and its composite action."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fake_gh import REPOSITORY_NAME
from tests.project import HANG_SECONDS, REPOSITORY

EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
# The parts of an expression: texts, functions, names of a context, operators.
TOKEN = re.compile(r"\s*('(?:[^']|'')*'|\w+\([^)]*\)|[A-Za-z_][\w.-]*|==|!=|&&|\|\||!|[()])")
OPERATORS = {"&&": " and ", "||": " or ", "!": " not ", "==": " == ", "!=": " != ", "(": "(", ")": ")"}
STATUS_FUNCTIONS = ("success()", "failure()", "always()")
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
    github: more of the context `github`. settings: the repository's variables. inputs: those of a run
    by hand.
    """

    workspace: Path
    temp: Path
    variables: Mapping[str, str]
    github: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    def run(self, workflow: str | Mapping[str, Any], job: str) -> Finished:
        """Run a job of a workflow in .github/workflows/, or of a workflow's content."""
        content = self.content(workflow) if isinstance(workflow, str) else workflow
        definition = content["jobs"][job]
        self.temp.mkdir(exist_ok=True)
        finished = Finished()
        summary = self.temp / "summary.md"
        summary.touch()
        context = {
            "github": {
                "repository": REPOSITORY_NAME,
                "job": job,
                "token": "",
                "sha": "0" * 40,
                **self.github,
            },
            "vars": self.settings,
            "inputs": self.inputs,
            "runner": {"environment": "self-hosted"},
            "steps": {},
        }
        if not condition(definition.get("if", "success()"), context, finished.conclusion):
            return Finished(conclusion="skipped")
        variables = {
            **self.variables,
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_EVENT_NAME": "pull_request"
            if "pull_request" in self.github.get("event", {})
            else "schedule",
            "GITHUB_JOB": job,
            "GITHUB_REPOSITORY": REPOSITORY_NAME,
            "GITHUB_RUN_ID": "7",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKFLOW": content["name"],
            "RUNNER_TEMP": str(self.temp),
            "RUNNER_TOOL_CACHE": str(self.workspace.parent / "tools"),
            **filled(definition.get("env", {}), context),
        }
        self._run_steps(definition["steps"], context, variables, finished)
        finished.summary = summary.read_text()
        return finished

    def content(self, workflow: str) -> dict[str, Any]:
        """Return the content of a workflow in .github/workflows/."""
        return dict(yaml.safe_load((self.workspace / ".github" / "workflows" / workflow).read_text()))

    def _run_steps(
        self,
        steps: list[dict[str, Any]],
        context: dict[str, Any],
        variables: Mapping[str, str],
        finished: Finished,
    ) -> None:
        for step in steps:
            name = step.get("name", step.get("uses", ""))
            if not condition(step.get("if", "success()"), context, finished.conclusion):
                continue
            finished.ran.append(name)
            given = {**variables, **filled(step.get("env", {}), context)}
            before = finished.conclusion
            finished.conclusion = "success"
            if "uses" in step:
                outputs = self._use(
                    step["uses"], filled(step.get("with", {}), context), context, given, finished
                )
            else:
                outputs = self._shell(step["run"], given, finished)
            context["steps"][step.get("id", name)] = {"outputs": outputs, "outcome": finished.conclusion}
            if before == "failure":
                finished.conclusion = before

    def _shell(self, script: str, variables: Mapping[str, str], finished: Finished) -> dict[str, str]:
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
        finished.log += ended.stdout
        if ended.returncode:
            finished.conclusion = "failure"
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _use(
        self,
        action: str,
        inputs: Mapping[str, str],
        context: Mapping[str, Any],
        variables: Mapping[str, str],
        finished: Finished,
    ) -> dict[str, str]:
        """Run the composite action; stand in for the actions of GitHub."""
        known: dict[str, Callable[[], dict[str, str]]] = {
            "actions/checkout": dict,  # the scratch repository is checked out
            "actions/upload-artifact": lambda: _upload(inputs, finished),
        }
        name, _, commit = action.partition("@")
        if name in known:
            assert re.fullmatch("[0-9a-f]{40}", commit), f"{action} is not pinned"
            return known[name]()
        assert name.endswith(ACTION), action
        # Another repository gets the action with the rest of ddpperf, in a folder of the runner.
        folder = (self.workspace if name.startswith("./") else REPOSITORY) / ACTION
        definition = yaml.safe_load((folder / "action.yml").read_text())
        assert set(inputs) <= set(definition["inputs"]), inputs
        defaults = {key: given["default"] for key, given in definition["inputs"].items()}
        inner = {**context, "inputs": {**filled(defaults, context), **inputs}, "steps": {}}
        self._run_steps(
            definition["runs"]["steps"], inner, {**variables, "GITHUB_ACTION_PATH": str(folder)}, finished
        )
        return filled({key: output["value"] for key, output in definition["outputs"].items()}, inner)


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a Markdown page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def workflow_of_another_repository(job: str) -> str:
    """Return a documented workflow, with a repository and a commit in place of the words to replace."""
    blocks = code_blocks(REPOSITORY / "docs" / "nightly.md", "yaml")
    (text,) = (block for block in blocks if "OWNER/ddpperf" in block and f"\n  {job}:\n" in block)
    return text.replace("OWNER", "team").replace("COMMIT", "0" * 40)


def _upload(inputs: Mapping[str, str], finished: Finished) -> dict[str, str]:
    files = sorted(path.name for path in Path(inputs["path"]).rglob("*") if path.is_file())
    assert files, f"{inputs['path']} has no files"
    finished.artifacts[inputs["name"]] = files
    return {}


def condition(text: str, context: Mapping[str, Any], conclusion: str) -> bool:
    """Return whether a step or job with this `if` runs; without a status function, success() is meant."""
    found = EXPRESSION.fullmatch(text.strip())
    expression = found[1] if found else text
    if not any(function in expression for function in STATUS_FUNCTIONS):
        expression = f"success() && ({expression})"
    return bool(evaluated(expression, context, conclusion))


def filled(values: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as texts, with each ${{ }} replaced by the value of its expression."""
    return {
        key: EXPRESSION.sub(lambda found: _text(evaluated(found[1], context)), _text(value))
        for key, value in values.items()
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def evaluated(expression: str, context: Mapping[str, Any], conclusion: str = "success") -> Any:
    """Return the value of an expression of GitHub; a missing name is an empty text."""
    functions = {
        "success()": conclusion == "success",
        "failure()": conclusion == "failure",
        "always()": True,
    }

    def python(token: str) -> str:
        if token in OPERATORS:
            return OPERATORS[token]
        if token.startswith("'"):
            return repr(token[1:-1].replace("''", "'"))
        return repr(functions[token] if token.endswith(")") else _named(token, context))

    tokens = TOKEN.findall(expression)
    assert "".join(tokens) == re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", expression), expression
    return eval("".join(map(python, tokens)))


def _named(name: str, context: Mapping[str, Any]) -> Any:
    value: Any = context
    for part in name.split("."):
        value = value.get(part, "") if isinstance(value, Mapping) else ""
    return value
