#!/usr/bin/env bash
# Make the run a baseline: commit its JSON to a branch, push it, and with PROMOTE=pull-request propose it.
#
# A run with PASS is promoted. A run with NO VERDICT is promoted only if its hardware has no baseline yet.
# STATUS: pytest's exit status. FOLDER: the output folder. PROMOTE: branch or pull-request. BRANCH: its name.
# What fails here is a warning, because the verdict stands.
set -euo pipefail

publish=$(realpath "$(dirname "$0")")/publish.py

warn() {
    echo "::warning title=ddpperf::$1"
    exit 0
}

if [ "$STATUS" = 125 ]; then
    [ -e "$FOLDER/run.json" ] || exit 0
    key=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["ddpperf"]["hardware_key"])' \
        "$FOLDER/run.json")
    if compgen -G "perf/baselines/$key/*.json" >/dev/null; then
        echo "not promoted: NO VERDICT"
        exit 0
    fi
    echo "$key has no baseline yet, so this run becomes the first one"
fi

if ! said=$("$PYTHON" -m ddpperf.results.promote "$FOLDER/run.json" --name nightly 2>&1); then
    warn "no baseline was stored: $said"
fi
baseline=${said#saved the baseline: }

case $PROMOTE in
    branch) onto=$(git rev-parse --quiet --verify "origin/$BRANCH" || git rev-parse HEAD) ;;
    pull-request) onto=$(git rev-parse HEAD) ;; # one commit, so that a person can review it
esac
worktree=$RUNNER_TEMP/ddpperf-baselines
git worktree prune
git worktree add --quiet --force --detach "$worktree" "$onto"
mkdir -p "$worktree/$(dirname "$baseline")"
mv "$baseline" "$worktree/$baseline"
cd "$worktree"
git add -- "$baseline"
git -c user.name='github-actions[bot]' -c user.email='41898282+github-actions[bot]@users.noreply.github.com' \
    commit --quiet -m "Store the baseline $(basename "$baseline")"

# The token is passed by the environment, so that it is in no file and in no command line.
if [ -n "${GITHUB_TOKEN:-}" ]; then
    header="Authorization: Basic $(printf 'x-access-token:%s' "$GITHUB_TOKEN" | base64 -w 0)"
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="http.$GITHUB_SERVER_URL/.extraHeader" GIT_CONFIG_VALUE_0=$header
fi
force=()
if [ "$PROMOTE" = pull-request ]; then force=(--force); fi # the newest night replaces an open proposal
if ! git push --quiet "${force[@]}" origin "HEAD:refs/heads/$BRANCH"; then
    warn "the baseline was not pushed to $BRANCH; give the job contents: write, or allow pushes to this branch"
fi
echo "pushed $baseline to $BRANCH"
if [ "$PROMOTE" = pull-request ]; then
    "$PYTHON" "$publish" pull-request "$STATUS" "$FOLDER" --branch "$BRANCH"
fi
