"""Join the profiler traces of all ranks into one file for Perfetto, ui.perfetto.dev.

    python -m ddpperf.report.perfetto FOLDER [-o FILE.json]

FOLDER is one of the folders that --traces made, with a file rank0.json, rank1.json, ... for each rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpperf.command import Parser, print_lines, refused
from ddpperf.errors import Refused, first_line
from ddpperf.results.stored_runs import require_replaceable, write_atomically

BEGINS = b'{"displayTimeUnit": "ms", "baseTimeNanoseconds": '
IDS_PER_RANK = 10**12
PIDS_PER_RANK = 10**7  # more than any process id, so that the ranks' processes stay apart


def joined(traces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one trace with the events of all ranks, on one time axis.

    traces: each rank's trace in Chrome's Trace Event Format. The process ids and the ids of arrows
    are made different for each rank. All ranks must have run on one machine, so that their
    timestamps are those of one clock.
    """
    begin = min(int(trace.get("baseTimeNanoseconds", 0)) for trace in traces.values())
    events = []
    for rank, trace in sorted(traces.items()):
        later = (int(trace.get("baseTimeNanoseconds", 0)) - begin) / 1e3
        used = {event.get("pid") for event in trace["traceEvents"] if event.get("ph") != "M"}
        # a rank's trace also names the GPUs of the other ranks
        events += [_moved(event, rank, later) for event in trace["traceEvents"] if event.get("pid") in used]
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": begin, "traceEvents": events}


def _moved(event: Mapping[str, Any], rank: int, microseconds: float) -> dict[str, Any]:
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] += microseconds
    if isinstance(moved.get("pid"), int):
        moved["pid"] += rank * PIDS_PER_RANK + 1  # the profiler's own process is -1
    elif "pid" in moved:
        moved["pid"] = f"rank {rank} {moved['pid']}"
    if isinstance(moved.get("id"), int):
        moved["id"] += rank * IDS_PER_RANK
    if moved.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank}"}
    if moved.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": rank}
    return moved


def read_traces(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the trace of each rank in a folder; raise Refused if there is none, or a damaged one."""
    traces = {}
    for path in folder.glob("rank*.json"):
        try:
            rank = int(path.stem.removeprefix("rank"))
            trace = json.loads(path.read_bytes() if path.is_file() else b"")
            if not all(isinstance(event, dict) for event in trace["traceEvents"]):
                raise ValueError("an event is no object")
            traces[rank] = trace
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
            raise Refused(f"{path} is no trace ({first_line(error)}); measure again with --traces") from error
    if not traces:
        raise Refused(
            f"{folder} holds no file such as rank0.json; name one of the folders that --traces made"
        )
    if missing := set(range(max(traces))) - traces.keys():
        raise Refused(f"{folder} lacks rank{min(missing)}.json; copy the traces of all ranks")
    return traces


def main() -> int:
    parser = Parser("ddpperf.report.perfetto", __doc__)
    parser.add_argument("folder", type=Path, help="a folder with the traces of all ranks")
    parser.add_argument("-o", "--output", type=Path, help="the joined file; FOLDER.json by default")
    given = parser.parse_args()
    folder = given.folder.absolute()
    output = given.output or folder.with_name(f"{folder.name}.json")
    try:
        require_replaceable("-o", str(output), BEGINS, "joined traces")
        write_atomically(output, json.dumps(joined(read_traces(folder))))
    except Refused as problem:
        return refused(problem)
    except OSError as error:
        return refused(f"{output} cannot be written ({error.strerror}); name another file with -o")
    except (TypeError, ValueError) as error:
        return refused(f"a trace in {folder} is damaged ({first_line(error)}); measure again with --traces")
    print_lines([f"saved {output}: open it in ui.perfetto.dev"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
