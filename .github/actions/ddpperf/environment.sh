#!/usr/bin/env bash
# Make the Python environment in which the action runs pytest, unless it exists. Its folder goes to
# $GITHUB_OUTPUT. ENVIRONMENT: the folder of an environment of the user, which is not changed, or empty.
# PYTHON: the interpreter that makes the environment. INSTALL: more arguments of pip install.
# The newest three environments are kept, because each takes about 6 GB.
set -euo pipefail

ddpperf=$(realpath "$(dirname "$0")/../../..") # the commit of ddpperf that the action belongs to

refuse() {
    echo "::error title=ddpperf::$1"
    exit 4
}

if [ -n "$ENVIRONMENT" ]; then
    [ -x "$ENVIRONMENT/bin/python" ] ||
        refuse "environment needs a folder with bin/python, got '$ENVIRONMENT'; make one with python3 -m venv"
    echo "folder=$ENVIRONMENT" >>"$GITHUB_OUTPUT"
    exit
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "python names '$PYTHON', which is no Python 3.11 or newer; install one, or name another"
# What the environment depends on: its Python, the requirements, and where ddpperf is.
key=$({
    "$PYTHON" -VV
    echo "$ddpperf $INSTALL"
    cat "$ddpperf/pyproject.toml" pyproject.toml requirements*.txt 2>/dev/null || true
} | sha256sum | cut -c 1-16)
folder=$RUNNER_TOOL_CACHE/ddpperf/$key
mkdir -p "$folder"
exec 9>"$folder/../.lock"
flock 9 # another job may be making or removing environments
if [ ! -e "$folder/ready" ]; then # a cancelled job may have left a part
    "$PYTHON" -m venv --clear "$folder" ||
        refuse "'$PYTHON' cannot make an environment; install its venv module (Debian: apt-get install python3-venv)"
    xargs "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ddpperf" \
        <<<"$INSTALL" # xargs understands quotes
    touch "$folder/ready"
fi
touch "$folder"
mapfile -t folders < <(ls -dt "$folder"/../*/)
rm -rf "${folders[@]:3}"
echo "folder=$folder" >>"$GITHUB_OUTPUT"
