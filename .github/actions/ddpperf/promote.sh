#!/usr/bin/env bash
# Make the run a baseline: commit its JSON to a branch, and push the branch.
#
# PROMOTE=branch adds the baseline to $BRANCH, which keeps all baselines. PROMOTE=pull-request proposes the
# baseline on the branch $BRANCH-KEY, where KEY is the hardware key. This branch has one commit, which a
# newer night replaces. A run with NO VERDICT is promoted only if its hardware has no baseline yet.
# STATUS: pytest's exit status. FOLDER: the output folder. PYTHON: its interpreter.
# Whatever fails here is a warning, because the verdict stands.
set -euo pipefail

publish=$(dirname "$0")/publish.py
errors=$(mktemp "$RUNNER_TEMP/ddpperf-errors.XXXXXX")
exec 2>>"$errors"

warn_of_failure() {
    local code=$? reason
    if [ "$code" -ne 0 ]; then
        reason=$(grep -v '^hint:' "$errors" | tail -n 3 | tr -s '\n' ' ') || true
        echo "::warning title=ddpperf::no baseline was stored: ${reason:-a command ended with exit status $code}"
    fi
    exit 0
}
trap warn_of_failure EXIT

if [ "$STATUS" = 125 ] && [ ! -e "$FOLDER/run.json" ]; then exit 0; fi

# The token is passed by the environment, so that it is in no file and in no command line.
if [ -n "${GITHUB_TOKEN:-}" ]; then
    header="Authorization: Basic $(printf 'x-access-token:%s' "$GITHUB_TOKEN" | base64 -w 0)"
    key=http.$GITHUB_SERVER_URL/.extraHeader # the empty value removes a header that the checkout left
    export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_{0,1}="$key" GIT_CONFIG_VALUE_0='' GIT_CONFIG_VALUE_1=$header
fi

worktree=$(mktemp -d "$RUNNER_TEMP/ddpperf-baselines.XXXXXX")
git worktree prune
git worktree add --quiet --detach "$worktree" HEAD
for attempt in 1 2 3; do # another job may push between fetch and push
    onto=HEAD
    if [ "$PROMOTE" = branch ] && git fetch --quiet origin "+refs/heads/$BRANCH:refs/remotes/origin/$BRANCH"; then
        onto=origin/$BRANCH
    fi
    git -C "$worktree" checkout --quiet --detach "$(git rev-parse "$onto")"
    : >"$errors"
    baseline=$("$PYTHON" -m ddpperf.results.promote "$FOLDER/run.json" --name nightly --root "$worktree")
    if [ "$STATUS" = 125 ] && [[ $baseline != */0001_* ]]; then
        echo "not promoted: NO VERDICT"
        exit 0
    fi
    git -C "$worktree" add --force -- "$baseline"
    git -C "$worktree" -c user.name='github-actions[bot]' \
        -c user.email='41898282+github-actions[bot]@users.noreply.github.com' \
        commit --quiet -m "Store the baseline $(basename "$baseline")"
    if [ "$PROMOTE" = branch ]; then
        target=$BRANCH push=(git -C "$worktree" push --quiet)
    else
        target=$BRANCH-$(basename "$(dirname "$baseline")") push=(git -C "$worktree" push --quiet --force)
    fi
    if "${push[@]}" origin "HEAD:refs/heads/$target"; then break; fi
    if [ "$attempt" = 3 ]; then
        echo "(give the job contents: write, or allow pushes to $target)" >&2
        exit 1
    fi
done
echo "pushed $baseline to $target"
if [ "$PROMOTE" = pull-request ]; then
    "$PYTHON" "$publish" pull-request "$STATUS" "$FOLDER" --branch "$target"
fi
