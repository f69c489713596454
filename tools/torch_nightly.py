"""Keep environments with nightlies of torch, of which one is the last good one.

    python3 -m tools.torch_nightly candidate [--version VERSION]
    python3 -m tools.torch_nightly accept VERSION

`candidate` installs the newest nightly, or the nightly VERSION, and prints the command that compares
it with the last good one. `accept` makes a nightly the last good one. If a nightly is slower,
`python -m ddpperf.bisect` finds the first slower one, with the environments of this folder.

The environments are in the folder of --folder, one for each version. The link `last-good` there
leads to the last good one. At most three environments are kept, because each takes about 5 GB. An
environment that another version of Python made is replaced.
$TORCH_NIGHTLY_INDEX is the address of the index from which pip installs nightlies. In a job of
GitHub Actions, `candidate` also writes the options of the command to $GITHUB_OUTPUT.
The command needs no installed package, so the Python of a runner can run it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.history.versions import DAY, CannotMeasure, environment, run_pip

ONLY_LOOK = ("--dry-run", "--ignore-installed", "--no-deps", "--report=-")


def newest(wanted: str | None) -> str:
    """Return the full version of the newest nightly in the index, or of the wanted one."""
    torch = f"torch=={wanted}" if wanted else "torch"
    with tempfile.TemporaryDirectory() as folder:
        try:  # Debian's python3 often has no pip, but can make environments with pip
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError as error:
            raise Refused(
                f"{sys.executable} cannot make an environment; install its venv module "
                "(Debian: apt-get install python3-venv)"
            ) from error
        report = run_pip([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *ONLY_LOOK, torch])
    (found,) = json.loads(report)["install"]
    version = str(found["metadata"]["version"])
    if not DAY.search(version):
        raise Refused(
            f"pip found torch {version}, which is no nightly; check TORCH_NIGHTLY_INDEX, and that pip's "
            "configuration names no other index"
        )
    return version


def last_good(folder: Path) -> str | None:
    """Return the version of the last good nightly, or None if there is none."""
    link = folder / "last-good"
    return os.readlink(link) if (link / "ready").exists() else None


def candidate(folder: Path, wanted: str | None) -> dict[str, str]:
    """Install a nightly, say what to run next, and return the outputs of a step of GitHub Actions."""
    if not (index := os.environ.get("TORCH_NIGHTLY_INDEX")):
        raise Refused(
            "TORCH_NIGHTLY_INDEX is not set; set it to the address of the index of torch's nightlies, "
            "in GitHub Actions as a repository variable"
        )
    os.environ |= {"PIP_INDEX_URL": index, "PIP_PRE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    version = newest(wanted)
    good = last_good(folder)
    if version == good:
        print(f"torch {version} is the newest nightly, and the last good one: nothing to compare")
        return {}
    names = [f"torch=={name}" for name in (good, version) if name]
    # The last good one, too, with this Python, so that torch is the only difference
    *base, new = (environment(folder, name, names[0]) for name in names)
    arguments = " ".join([*(f"--base={python}" for python in base), f"--candidate={new}"])
    compared = f"torch {good}, the last good nightly" if good else "the released torch"
    print(f"torch {version} is installed. To compare it with {compared}, run:")
    print(f"    python -m pytest perf/ -m gate {arguments}")
    return {"version": version, "arguments": arguments, "good": good or "", "folder": str(folder)}


def accept(folder: Path, version: str) -> None:
    """Make a nightly the last good one. The link is replaced in one step, so it is never missing."""
    if not (folder / version / "ready").exists():
        raise Refused(f"{folder} has no environment of torch {version}; run candidate first")
    new = folder / "last-good.new"
    new.unlink(missing_ok=True)
    new.symlink_to(version)
    new.replace(folder / "last-good")
    print(f"torch {version} is the last good nightly now")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.torch_nightly", description="Keep nightlies of torch.")
    cache = os.environ.get("RUNNER_TOOL_CACHE") or Path.home() / ".cache"  # a runner keeps it between jobs
    parser.add_argument("--folder", type=Path, default=Path(cache, "torch-nightly"), help="the environments")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("candidate").add_argument("--version", help="a nightly; the newest by default")
    commands.add_parser("accept").add_argument("version")
    given = parser.parse_args()
    folder = given.folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until another command has made or removed its environments
            if given.command == "accept":
                accept(folder, given.version)
            else:
                outputs = candidate(folder, given.version)
                with open(os.environ.get("GITHUB_OUTPUT") or os.devnull, "a", encoding="utf-8") as file:
                    file.writelines(f"{name}={text}\n" for name, text in outputs.items())
        return 0
    except (CannotMeasure, Refused, OSError) as error:
        what = "no nightly is compared, because " if isinstance(error, CannotMeasure) else ""
        problem = " ".join(f"{what}{error}".split())
    if "GITHUB_OUTPUT" in os.environ:
        print(f"::error title=ddpperf::{problem}")
    else:
        print(problem, file=sys.stderr)
    return 4


if __name__ == "__main__":
    sys.exit(main())
