#!/usr/bin/env bash
# Name or make the Python environment in which the action runs pytest.
#
#   environment.sh name   write the environment's folder, and the key of its contents, to $GITHUB_OUTPUT
#   environment.sh make   make the environment in $FOLDER, if it does not exist
#
# ENVIRONMENT: the folder of an environment that exists already; it has no key, and is not changed.
# PYTHON: the interpreter that makes the environment. INSTALL: more arguments of pip install.
# The newest three environments are kept, because each takes about 6 GB.
set -euo pipefail

ddpperf=$(realpath "$(dirname "$0")/../../..") # the commit of ddpperf that the action belongs to

refuse() {
    echo "::error title=ddpperf::$1"
    exit 4
}

name() {
    if [ -n "${ENVIRONMENT:-}" ]; then
        [ -x "$ENVIRONMENT/bin/python" ] ||
            refuse "environment needs a folder with bin/python, got '$ENVIRONMENT'; make one with python3 -m venv"
        echo "folder=$ENVIRONMENT" >>"$GITHUB_OUTPUT"
        return
    fi
    command -v "$PYTHON" >/dev/null || refuse "python names '$PYTHON', which was not found; install Python 3.11 or newer"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        refuse "python names '$PYTHON', which is $("$PYTHON" -V 2>&1); ddpperf needs Python 3.11 or newer"
    # What the environment depends on: its Python, the requirements, and where ddpperf is.
    key=$({
        "$PYTHON" -VV
        echo "$ddpperf $INSTALL"
        cat "$ddpperf/pyproject.toml"
        cat pyproject.toml requirements*.txt 2>/dev/null || true
    } | sha256sum | cut -c 1-16)
    echo "key=ddpperf-$key" >>"$GITHUB_OUTPUT"
    echo "folder=$RUNNER_TOOL_CACHE/ddpperf/$key" >>"$GITHUB_OUTPUT"
}

make() {
    local words folders more=()
    mkdir -p "$(dirname "$FOLDER")"
    exec 9>"$(dirname "$FOLDER")/.lock"
    flock 9 # another job may be making or removing environments
    if [ ! -e "$FOLDER/ready" ]; then
        rm -rf "$FOLDER" # a cancelled job may have left a part
        "$PYTHON" -m venv "$FOLDER" ||
            refuse "'$PYTHON' cannot make an environment; install its venv module (Debian: apt-get install python3-venv)"
        words=$(xargs -r -n 1 printf '%s\n' <<<"$INSTALL") # xargs understands quotes
        if [ -n "$words" ]; then mapfile -t more <<<"$words"; fi
        "$FOLDER/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ddpperf" "${more[@]}"
        touch "$FOLDER/ready"
    fi
    touch "$FOLDER"
    mapfile -t folders < <(ls -dt "$(dirname "$FOLDER")"/*/)
    if [ "${#folders[@]}" -gt 3 ]; then rm -rf "${folders[@]:3}"; fi
}

"$1"
