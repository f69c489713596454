"""Stored runs of schema 2 as runs of schema 3, whose rows hold the findings of all comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

FINDINGS = {"worse": "worse", "better": "not worse", "unchanged": "not worse"}  # others are undecided
CONTROLS = {"negative": "copy of memory", "positive": "delayed step"}
OLD = ("against", "comparison", "confirmed")  # an A/B run; a comparison with a stored run; its A/B part


def converted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored run of schema 2 as one of schema 3; a damaged run may raise any error.

    The rows of its comparison have only the fields that reports read.
    """
    old = document["ddpperf"]
    header = {name: value for name, value in old.items() if name not in OLD} | {"schema": 3}
    ab, comparison = old.get("against") or old.get("confirmed") or {}, old.get("comparison") or {}
    if ab or comparison:
        header["judged"] = {
            "sides": {side: ab[side] for side in ("base", "candidate")} if ab else None,
            "rows": _rows(ab, comparison),
            "interval": "95%",
            "late": ab.get("late", ""),
            "new": comparison.get("new", []),
            "drifts": comparison.get("drifts", {}),
        }
    return {**document, "ddpperf": header}


def _rows(ab: Mapping[str, Any], comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an A/B measurement, then those that were compared with the stored run only."""
    changes = {**comparison.get("changes", {}), **comparison.get("controls", {})}
    stored = [_stored_row(name, change) for name, change in changes.items() if isinstance(change, Mapping)]
    by_key = {(*row["tests"], row["control"], row["metric"]): row for row in stored}
    rows = []
    for row in map(_ab_row, ab.get("rows", ())):
        if found := by_key.pop((*row["tests"], row["control"], row["metric"]), None):
            row |= {name: found[name] for name in ("stored_ratio", "stored_slower")}
            row["stages"] = [*found["stages"], *row["stages"]]
        rows.append(row)
    return [*rows, *by_key.values()]


def _ab_row(row: Mapping[str, Any]) -> dict[str, Any]:
    control = CONTROLS.get(row["control"])
    judged = bool(row["gated"] or control)
    return {
        **{name: row[name] for name in ("metric", "base", "candidate", "ratio", "low", "high")},
        "tests": [] if control else [row["test"]],
        "control": control,
        "stages": ["first", "repeat"] if row["confirmed"] else ["first"],
        "finding": FINDINGS.get(row["finding"], "undecided") if judged else "for information",
        "suspicious": judged and row["finding"] == "suspect",
        "stored_ratio": None,
        "stored_slower": False,
    }


def _stored_row(name: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a test or control that was compared with the stored run."""
    then, now, control = change["then_seconds"], change["now_seconds"], CONTROLS.get(name)
    limit = inf if change["limit"] is None else change["limit"]
    judged = bool(change["judged"])
    suspicious = judged and now / then > (change["suspect_limit"] or limit)
    # The comparison finds 95% of the slow-downs by the ratio "noticed".
    unclear = suspicious or (change.get("noticed") or limit) > 1 + change["tolerance"]
    return {
        "tests": [] if control else [name],
        "metric": "cpu_seconds" if change["quantity"] == "CPU seconds" else "time",
        "control": control,
        **{"base": then, "candidate": now, "ratio": now / then, "low": None, "high": None},
        "stages": ["stored run"],
        "finding": ("undecided" if unclear else "not worse") if judged else "for information",
        "suspicious": suspicious,
        "stored_ratio": now / then,
        "stored_slower": judged and now / then > limit,
    }
