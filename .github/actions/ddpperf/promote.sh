#!/usr/bin/env bash
# Make the run a baseline: commit its JSON to the branch of baselines, and push the branch.
#
# A run with NO VERDICT is promoted only if its hardware has no baseline yet. STATUS: pytest's exit status.
# FOLDER: the output folder. PYTHON: the interpreter that ran pytest. A failure here is only a warning,
# because the verdict of the run does not depend on it.
set -euo pipefail

errors=$(mktemp "$RUNNER_TEMP/errors.XXXXXX")
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
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=credential.helper GIT_CONFIG_VALUE_0='!gh auth git-credential'
worktree=$(mktemp -d "$RUNNER_TEMP/baselines.XXXXXX")
git worktree prune
git worktree add --quiet --detach "$worktree" HEAD
for attempt in 1 2 3; do # another job may push between fetch and push
    onto=HEAD
    if git fetch --quiet origin "+refs/heads/$BRANCH:refs/remotes/origin/$BRANCH"; then onto=origin/$BRANCH; fi
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
    if git -C "$worktree" push --quiet origin "HEAD:refs/heads/$BRANCH"; then break; fi
    if [ "$attempt" = 3 ]; then
        echo "(give the job contents: write, or allow pushes to $BRANCH)" >&2
        exit 1
    fi
done
echo "pushed $baseline to $BRANCH"
