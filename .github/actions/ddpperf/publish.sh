#!/usr/bin/env bash
# Show the verdict of a run on GitHub: as an annotation, the step's summary, a check, and a comment on the
# pull request.
#
# STATUS: pytest's exit status. FOLDER: the output folder. SHA: the commit that gets the check. PULL: the
# number of the pull request that gets the comment, or empty. GH_TOKEN: the token; without a token, only
# the annotation and the summary are shown. A request that GitHub refuses is only a warning, because the
# verdict does not depend on it.
set -euo pipefail

job="$GITHUB_WORKFLOW / $GITHUB_JOB"
url=$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/actions/runs/$GITHUB_RUN_ID
page=$(mktemp "$RUNNER_TEMP/page.XXXXXX")
errors=$(mktemp "$RUNNER_TEMP/errors.XXXXXX")
export GH_HOST=${GITHUB_SERVER_URL#https://} GH_ENTERPRISE_TOKEN=$GH_TOKEN MARKER="<!-- ddpperf: $job -->"

printable() { # with ? for control characters, which a terminal obeys
    LC_ALL=C sed 's/\xc2[\x80-\x9f]/?/g' | LC_ALL=C tr '\000-\010\013-\037\177' '?'
}

read_verdict() { # from the page; a refused run has none, so the last lines of its log stand for the page
    case $STATUS in
        0) expected=PASS conclusion=success level=notice ;;
        1) expected=FAIL conclusion=failure level=error ;;
        125) expected="NO VERDICT" conclusion=neutral level=warning ;;
        *) expected="" ;;
    esac
    if [ -e "$FOLDER/verdict.md" ]; then
        printable <"$FOLDER/verdict.md" >"$page"
        verdict=$(sed -n '1s/^## ddpperf: //p' "$page")
        title="$verdict: $(sed -n 4p "$page")"
        if [ "$verdict" != "$expected" ]; then title="exit status $STATUS after $title" expected=""; fi
    else
        why=$(printable <"$FOLDER/output.txt" | sed -n 's/^ERROR: //p' | sed -n 1p)
        title="no verdict, exit status $STATUS: ${why:-no performance test was measured; read the log}" expected=""
        printf '## ddpperf: no verdict, exit status %s\n\n```text\n' "$STATUS" >"$page"
        tail -n 20 "$FOLDER/output.txt" | printable | tr '`' "'" >>"$page"
        printf '```\n' >>"$page"
    fi
    if [ -z "$expected" ]; then conclusion=failure level=error; fi
}

shorten_page() { # GitHub takes 65,535 characters; the tables go first
    if [ "$(wc -c <"$page")" -le 60000 ]; then return; fi
    sed '/^<details>/,$d' "$page" >"$page.verdict"
    head -c 60000 "$page.verdict" | sed '$d' >"$page"
    if [ $(($(grep -c '^```' "$page") % 2)) = 1 ]; then echo '```' >>"$page"; fi
    printf '\nThe rest is too long for GitHub. It is in verdict.md of the artifact.\n' >>"$page"
}

api() { timeout 60 gh api "$@" 2>"$errors"; }

add_check() { # only a check can be neutral, which stands for NO VERDICT
    api "repos/$GITHUB_REPOSITORY/check-runs" -f name="ddpperf: $job" -f head_sha="$SHA" -f status=completed \
        -f conclusion="$conclusion" -f details_url="$url" \
        -f "output[title]=${title:0:250}" -F "output[summary]=@$page" >"$page.answer"
}

write_comment() { # into the comment of this job, which begins with the marker, or into a new one
    printf '%s\n[%s](%s), commit %s\n\n' "$MARKER" "$job" "$url" "${SHA:0:9}" | cat - "$page" >"$page.comment"
    local comments=repos/$GITHUB_REPOSITORY/issues/$PULL/comments ids
    ids=$(api --paginate "$comments?per_page=100" --jq '.[] | select(.body | startswith(env.MARKER)) | .id') || return
    if [ -n "$ids" ]; then
        comments="repos/$GITHUB_REPOSITORY/issues/comments/${ids%%$'\n'*} --method PATCH"
    fi
    # shellcheck disable=SC2086 # the words of $comments are arguments
    api $comments -F body=@"$page.comment" >"$page.answer"
}

warn() {
    echo "::warning title=ddpperf::no $1 was published: $(printable <"$errors" | tr -s '\n' ' ')" \
        "(a job needs checks: write and pull-requests: write; a fork's token may only read)"
}

read_verdict
echo "::$level title=ddpperf::${title//%/%25}"
cat "$page" >>"$GITHUB_STEP_SUMMARY"
if [ -z "$GH_TOKEN" ]; then exit 0; fi
shorten_page
add_check || warn check
if [ -n "$PULL" ]; then write_comment || warn comment; fi
