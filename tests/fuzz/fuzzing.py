"""Run a check on generated hostile inputs, and mutate documents of JSON."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MOST_LETTERS = 300  # of a sentence
SHORT, LONG = "short", "long"
# A short run has the same inputs each time, so that a change that has nothing to do with it does not fail.
settings.register_profile(SHORT, deadline=None, derandomize=True, database=None)
settings.register_profile(LONG, deadline=None, database=None, suppress_health_check=list(HealthCheck))
BOTH = pytest.mark.parametrize("profile", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])

Input = TypeVar("Input")


def fuzz(
    profile: str, inputs: st.SearchStrategy[Input], check: Callable[[Input], object], *, short: int, long: int
) -> None:
    """Run a check on at least `short` or `long` inputs, by the profile; fail with the smallest bad input."""
    examples, checked = long if profile == LONG else short, 0

    @settings(settings.get_profile(profile), max_examples=examples)
    @given(inputs)
    def run(value: Input) -> None:
        nonlocal checked
        check(value)
        checked += 1

    run()
    assert checked >= examples, "Hypothesis found no more inputs"


def require_sentence(error: BaseException | str, *hidden: object) -> None:
    """Require that a message is one short sentence without control characters.

    hidden: paths in the message, which do not count as letters.
    """
    sentence = str(error)
    for path in hidden:
        sentence = sentence.replace(str(path), "FILE")
    assert sentence, "an empty message"
    assert sentence.isprintable(), ascii(sentence)
    assert len(sentence) <= MOST_LETTERS, f"{len(sentence)} letters: {sentence[:1000]}"


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 10**9, 2**31, 2**63, -(2**63), 10**400, -(10**400)),
    *(0.5, -0.0, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan),
    *(
        "",
        "\0",
        "0a1b\0",
        "a\nb",
        "\r::error::x",
        "\x1b]0;x\x07",
        "\ud800",
        "\u202e",
        "x" * 5000,
        "--output=x",
    ),
    *(
        "../../etc/passwd",
        "os.system:x",
        "torchvision:x",
        "nan",
        "1e999",
        "NaN",
        "__class__",
        "{0.__class__}",
    ),
    *([], {}, [[]], [{}], [None], {"": None}, DEEP, [0] * 2000),
]
values = (
    st.sampled_from(HOSTILE)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.lists(st.none() | st.integers(), max_size=3)
)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a document of JSON, with each of its keys or indices."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in [*items]:
        yield document, key
        yield from places(value)


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a document of JSON with one to four changes."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        found = [*places(changed)]
        if not found:
            return draw(values)
        container, key = found[draw(st.integers(0, len(found) - 1))]
        match draw(st.sampled_from(("replace", "remove", "exchange", "rename", "repeat"))):
            case "replace":
                container[key] = copy.deepcopy(draw(values))
            case "remove":
                del container[key]
            case "exchange":
                other, other_key = found[draw(st.integers(0, len(found) - 1))]
                container[key] = copy.deepcopy(other[other_key])
            case "rename" if isinstance(container, dict):
                container[draw(st.text(max_size=9))] = container.pop(key)
            case _ if isinstance(container, list):
                container.extend([copy.deepcopy(container[key]) for _ in range(draw(st.integers(1, 50)))])
    return changed


def as_bytes(document: Any) -> bytes:
    """Return a document as JSON in UTF-8, with numbers that only a foreign writer makes."""
    return json.dumps(document).replace("Infinity", "1e999").encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file with flipped bits, a lost end, or foreign bytes in it."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(changed) - 1)))
        match draw(st.sampled_from(("flip", "cut", "insert", "remove"))):
            case "flip" if changed:
                changed[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del changed[place:]
            case "insert":
                changed[place:place] = draw(st.binary(min_size=1, max_size=20) | st.just(b"[" * 2000))
            case _:
                del changed[place : place + draw(st.integers(1, 100))]
    return bytes(changed)
