"""The script that makes a run a baseline, on a scratch repository and its origin."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.canned import CannedSuite
from tests.fake_gh import TOKEN, install
from tests.project import ALL_REDUCE, REPOSITORY, git
from tests.workflow import ACTION

OTHER = "\ndef test_other(measure):\n    test_all_reduce(measure)\n"


@dataclass
class Job:
    """A job whose run is in the output folder, and the environment variables of its last step."""

    root: Path
    origin: Path
    folder: Path
    variables: dict[str, str]

    def promote(self, *, status: str = "0", **variables: str) -> str:
        """Run the script, which never fails; return what it printed."""
        ended = subprocess.run(
            [REPOSITORY / ACTION / "promote.sh"],
            cwd=self.root,
            env=self.variables | {"STATUS": status} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def baselines(self, branch: str) -> list[str]:
        """Return the names of the baselines on a branch of the origin, with the folder of their hardware."""
        git(self.root, "fetch", "--quiet", "--prune", "origin")
        tree = f"origin/{branch}:perf/baselines"
        found = git(self.root, "ls-tree", "-r", "--name-only", tree).splitlines()
        return [path.replace(self.hardware, "KEY") for path in found]

    @property
    def run(self) -> Path:
        return self.folder / "run.json"

    @property
    def hardware(self) -> str:
        return str(json.loads(self.run.read_text())["ddpperf"]["hardware_key"])


@pytest.fixture
def job(canned_suite: CannedSuite, tmp_path_factory: pytest.TempPathFactory) -> Job:
    root, origin = canned_suite.root, tmp_path_factory.mktemp("origin")
    folder, temp = tmp_path_factory.mktemp("output"), tmp_path_factory.mktemp("temp")
    canned_suite.experiment.write_text(ALL_REDUCE + OTHER)
    canned_suite.run("perf", f"--benchmark-json={folder / 'run.json'}")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("GIT_", "GITHUB_"))}
    variables = {
        **clean,
        **install(temp / "bin"),
        "BRANCH": "baselines",
        "FOLDER": str(folder),
        "GH_TOKEN": TOKEN,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "RUNNER_TEMP": str(temp),
    }
    job = Job(root=root, origin=origin, folder=folder, variables=variables)
    git(origin, "init", "--quiet", "--bare", "-b", "main")
    git(root, "init", "--quiet", "-b", "main")
    git(root, "remote", "add", "origin", str(origin))
    (root / ".gitignore").write_text(".ddpperf/\nperf/baselines/\n")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "first")
    git(root, "push", "--quiet", "origin", "main")
    return job


def test_branch_keeps_all_baselines(job: Job) -> None:
    assert job.promote() == f"pushed perf/baselines/{job.hardware}/0001_nightly.json to baselines\n"
    job.promote()
    assert job.baselines("baselines") == ["KEY/0001_nightly.json", "KEY/0002_nightly.json"]
    assert git(job.root, "status", "--porcelain") == ""


def test_baseline_of_another_job_is_kept(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The other job pushes after the fetch of this job, which then finds the next number."""
    job.promote()
    other = tmp_path_factory.mktemp("other")
    hook = job.root / ".git" / "hooks" / "pre-push"
    git(other, "clone", "--quiet", "-b", "baselines", str(job.origin), ".")
    hook.write_text(
        f"#!/bin/sh\nunset GIT_DIR\ncd {other} || exit 1\n[ -e second ] && exit 0\ntouch second\n"
        f"cp perf/baselines/*/0001_nightly.json perf/baselines/{job.hardware}/0002_nightly.json\n"
        "git add -f perf && git -c user.name=o -c user.email=o@o commit -qm other && git push -q origin\n"
    )
    hook.chmod(0o755)
    assert job.promote() == f"pushed perf/baselines/{job.hardware}/0003_nightly.json to baselines\n"
    assert job.baselines("baselines") == [f"KEY/000{number}_nightly.json" for number in (1, 2, 3)]
    assert git(job.root, "log", "--format=%an", "origin/baselines", "-3").splitlines()[1] == "o"


def test_no_verdict_makes_only_the_first_baseline(job: Job) -> None:
    assert job.promote(status="125").startswith("pushed ")
    assert job.promote(status="125") == "not promoted: NO VERDICT\n"
    assert job.baselines("baselines") == ["KEY/0001_nightly.json"]


def test_push_has_the_token_of_the_job(job: Job) -> None:
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers.get("Authorization", ""))
            self.send_response(403 if sent[-1] else 401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        git(
            job.root, "remote", "set-url", "origin", f"http://127.0.0.1:{server.server_port}/team/ddpperf.git"
        )
        said = job.promote()
        server.shutdown()
    assert "The requested URL returned error: 403 (give the job contents: write, or allow" in said
    token = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
    assert f"Basic {token}" in sent


def refuse_pushes(job: Job) -> None:
    hook = job.origin / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\necho 'protected branch'\nexit 1\n")
    hook.chmod(0o755)


@pytest.mark.parametrize(
    ("spoil", "variables", "reason"),
    [
        (refuse_pushes, {}, "give the job contents: write, or allow pushes to baselines"),
        (lambda job: None, {"PYTHON": "/nowhere/python"}, "/nowhere/python: No such file or directory"),
    ],
)
def test_failure_is_one_warning(
    job: Job, spoil: Callable[[Job], object], variables: dict[str, str], reason: str
) -> None:
    spoil(job)
    (said,) = job.promote(**variables).splitlines()
    assert said.startswith("::warning title=ddpperf::no baseline was stored: ")
    assert reason in said
