"""The words of a stored run's command line that another run of the same work needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

WRITES = (  # options that write files
    *("--benchmark-json", "--benchmark-save", "--report", "--verdict", "--junitxml", "--tables"),
    *("--durations", "--worker-logs", "--traces", "--csv"),
)
CHOOSES = ("-k", "-m", "--full", "--deselect", "--ignore", "--lf", "--last-failed")  # tests
FLAGS = (  # long options without a value
    *(
        "--full",
        "--tables",
        "--lf",
        "--last-failed",
        "--ff",
        "--failed-first",
        "--sw",
        "--stepwise",
    ),
    *("--exitfirst", "--verbose", "--quiet", "--benchmark-verbose", "--benchmark-autosave"),
)
SHORT_WITH_A_VALUE = ("-k", "-m", "-p", "-n", "-c", "-o", "-W", "-r")
MAY_HAVE_A_VALUE = ("--benchmark-compare",)
OF_COMPARISONS = (  # options that say what is compared, and how often
    *("--benchmark-compare", "--benchmark-compare-fail", "--base", "--candidate"),
    *("--replicates", "--max-seconds", "-x", "--maxfail"),
)


def command_words(header: Mapping[str, Any], *, tests: bool, without: Sequence[str] = ()) -> str:
    """Return a run's command line behind `pytest`, without what writes files, and without some options.

    tests: whether the words that choose tests are kept, too.
    """
    words = shlex.split(header.get("options", {}).get("command_line", ""))
    kept: list[str] = []
    option = ""  # whose value the next word is
    for word, following in pairwise([*words, "-"]):
        is_short = re.match(r"-\w", word) is not None
        name = word[:2] if is_short else word.partition("=")[0] if word.startswith("-") else option
        is_path = name in MAY_HAVE_A_VALUE and (following.startswith(("perf", "tests")) or "::" in following)
        takes_value = word in SHORT_WITH_A_VALUE if is_short else "=" not in word and name not in FLAGS
        is_option = word.startswith("-") and not option
        option = name if is_option and takes_value and not is_path and following[:1] != "-" else ""
        if name not in (*WRITES, *without) and (tests or (name and name not in CHOOSES)):
            kept.append(word)
    return " ".join(map(shlex.quote, kept))
