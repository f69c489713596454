"""Keep environments with nightlies of torch, of which one is the last good one.

    python3 tools/torch_nightly.py candidate [--version VERSION]
    python3 tools/torch_nightly.py accept VERSION

`candidate` installs the newest nightly, or the nightly VERSION, and prints the command that compares
it with the last good one. `accept` makes a nightly the last good one. If a nightly is slower,
`python -m ddpperf.bisect` finds the first slower one, with the environments of this folder.

The environments are in the folder of --folder, one for each version. The link `last-good` there
leads to the last good one. At most three environments are kept, because each takes about 5 GB. An
environment that another version of Python made is replaced.
$TORCH_NIGHTLY_INDEX is the address of the index from which pip installs nightlies. In a job of
GitHub Actions, `candidate` also writes the options of the command to $GITHUB_OUTPUT.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

MOST_ENVIRONMENTS = 3
DAY = re.compile(r"\.dev\d{8}")  # of a nightly, as in 2.15.0.dev20261123+cu130


class Stopped(Exception):
    """The command cannot go on; the text says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Nightlies:
    """The folder of environments, and the index from which new ones are installed."""

    folder: Path
    index: str

    def environment(self, version: str) -> Path:
        return self.folder / version

    def python(self, version: str) -> Path:
        return self.environment(version) / "bin" / "python"

    def last_good(self) -> str | None:
        """Return the version of the last good nightly, or None if there is none."""
        link = self.folder / "last-good"
        return os.readlink(link) if (link / "ready").exists() else None

    def newest(self, wanted: str | None) -> str:
        """Return the full version of the newest nightly in the index, or of the wanted one."""
        if not self.index:
            raise Stopped(
                "TORCH_NIGHTLY_INDEX is not set; set it to the address of the index of torch's nightlies, "
                "in GitHub Actions as a repository variable"
            )
        self._make("pip")  # Debian's python3 often has no pip, but can make environments with pip
        only_look = ("--dry-run", "--ignore-installed", "--no-deps", "--report=-")
        torch = f"torch=={wanted}" if wanted else "torch"
        (found,) = json.loads(self._pip_install("pip", *only_look, torch))["install"]
        version = str(found["metadata"]["version"])
        if not DAY.search(version):
            raise Stopped(
                f"pip found torch {version}, which is no nightly; check TORCH_NIGHTLY_INDEX, and that pip's "
                "configuration names no other index"
            )
        return version

    def make(self, version: str) -> None:
        """Make the environment of a nightly, unless this version of Python already made one."""
        self._make(version, f"torch=={version}", "numpy")
        os.utime(self.environment(version))
        self._remove_old()

    def accept(self, version: str) -> None:
        """Make a nightly the last good one. The link is replaced in one step, so it is never missing."""
        self._require(version)
        new = self.folder / "last-good.new"
        new.unlink(missing_ok=True)
        new.symlink_to(version)
        new.replace(self.folder / "last-good")
        self._remove_old()

    def _make(self, name: str, *packages: str) -> None:
        """Make an environment, unless this Python already made it, as its file `ready` says."""
        ready = self.environment(name) / "ready"
        if ready.exists() and ready.read_text() == sys.version:
            return
        try:
            venv.create(self.environment(name), with_pip=True, clear=True)
        except subprocess.CalledProcessError as error:
            raise Stopped(
                f"{sys.executable} cannot make an environment; install its venv module "
                "(Debian: apt-get install python3-venv)"
            ) from error
        if packages:
            self._pip_install(name, *packages)
        ready.write_text(sys.version)

    def _pip_install(self, name: str, *arguments: str) -> str:
        options = ("--quiet", "--disable-pip-version-check", "--pre", f"--index-url={self.index}")
        return _run(self.python(name), "-m", "pip", "install", *options, *arguments)

    def _require(self, version: str) -> None:
        environment = self.environment(version)
        if environment.is_symlink() or not (environment / "ready").exists():
            raise Stopped(f"{self.folder} has no environment of torch {version}; run candidate first")

    def _remove_old(self) -> None:
        """Remove all but the last good environment and the newest others, also incomplete ones."""
        found = {path for path in self.folder.iterdir() if DAY.search(path.name)}
        ready = [path for path in found if (path / "ready").exists()]
        ready.sort(key=lambda path: (path.name != self.last_good(), -path.stat().st_mtime))
        for environment in found - set(ready[:MOST_ENVIRONMENTS]):
            shutil.rmtree(environment)


def _run(python: Path, *arguments: str) -> str:
    """Run Python, and return its output; raise Stopped with the last line of its errors."""
    ended = subprocess.run([python, *arguments], capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise Stopped(f"python {' '.join(arguments)} failed: {last}")
    return ended.stdout


def candidate(nightlies: Nightlies, wanted: str | None) -> dict[str, str]:
    """Install a nightly, say what to run next, and return the outputs of the step."""
    version = nightlies.newest(wanted)
    good = nightlies.last_good()
    if version == good:
        print(f"torch {version} is the newest nightly, and the last good one: nothing to compare")
        return {}
    if good:
        nightlies.make(good)  # with this Python, so that torch is the only difference
    nightlies.make(version)
    base = f"--base={nightlies.python(good)} " if good else ""
    arguments = f"{base}--candidate={nightlies.python(version)}"
    compared = f"torch {good}, the last good nightly" if good else "the released torch"
    print(f"torch {version} is installed. To compare it with {compared}, run:")
    print(f"    python -m pytest perf/ -m gate {arguments}")
    found = {"good": good or "", "folder": str(nightlies.folder)}
    return {"version": version, "arguments": arguments, **found}


def _append(variable: str, text: str) -> None:
    """Append text to the file that a variable of GitHub Actions names, if there is one."""
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/torch_nightly.py", description="Keep nightlies of torch.")
    cache = os.environ.get("RUNNER_TOOL_CACHE") or Path.home() / ".cache"  # a runner keeps it between jobs
    parser.add_argument("--folder", type=Path, default=Path(cache, "torch-nightly"), help="the environments")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("candidate").add_argument("--version", help="a nightly; the newest by default")
    commands.add_parser("accept").add_argument("version")
    given = parser.parse_args()
    index = os.environ.get("TORCH_NIGHTLY_INDEX", "")
    nightlies = Nightlies(folder=given.folder.absolute(), index=index)
    try:
        nightlies.folder.mkdir(parents=True, exist_ok=True)
        with (nightlies.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until another command has made or removed its environments
            run(nightlies, given)
        return 0
    except (Stopped, OSError) as error:
        problem = " ".join(f"{error}".split())
    if "GITHUB_OUTPUT" in os.environ:
        print(f"::error title=ddpperf::{problem}")
    else:
        print(problem, file=sys.stderr)
    return 4


def run(nightlies: Nightlies, given: argparse.Namespace) -> None:
    """Run the command that was given."""
    if given.command == "candidate":
        outputs = candidate(nightlies, given.version)
        lines = "".join(f"{name}={text}\n" for name, text in outputs.items())
        _append("GITHUB_OUTPUT", lines)
    else:
        nightlies.accept(given.version)
        print(f"torch {given.version} is the last good nightly now")


if __name__ == "__main__":
    sys.exit(main())
