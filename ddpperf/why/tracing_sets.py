"""Process sets of both sides that run, time or trace steps of one measurement on command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import Spec
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import Answers, ProcessSet

MOST_LETTERS = 50  # of a test's name in the names of its files


class TracingSets:
    """The live process sets of a pool with a measurement that is open on them, as a context manager.

    sets: in the order of their rounds. sides: one set of each side, by the side's name. folder: of the
    kept traces; others are deleted at the end. test: whose name the files of kept traces have.
    """

    def __init__(
        self, pool: Pool, spec: Spec, candidate: Spec | None, folder: Path, test: str, most_sets: int = 0
    ) -> None:
        self._pool, self._folder = pool, folder.resolve()
        name = re.sub(r"\W+", "-", test.rpartition("::")[2]).strip("-")[:MOST_LETTERS]
        self._ranks = spec.turns(pool.options.devices_in_turn)[0]
        self._traces = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        # Two tests may have the same name, or one the begin of the other's.
        self._name = f"{1 + len([*self._folder.glob('*-base-rank*')])}-{name}"
        self._jobs = pool.open(spec, candidate, most_sets=most_sets)
        self.sets = [live for live, _ in self._jobs]
        self.sides: Mapping[str, ProcessSet] = {live.side.name: live for live in reversed(self.sets)}

    def __enter__(self) -> TracingSets:
        self.all_do("load")
        self._scratch = TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._scratch:
            # After Ctrl-C, answers may still be on their way.
            if all(live.alive for live in self.sets) and (kind is None or issubclass(kind, Exception)):
                self.all_do("free")
                self._pool.close_opened(self._jobs)

    def all_do(self, what: str) -> None:
        """Let all process sets do something at the same time that runs no step."""
        for live in self.sets:
            live.ask("trace", ranks=self._ranks, steps=0, what=what)
        for live in self.sets:
            live.answers()

    def do(self, live: ProcessSet, what: str, steps: int = 0) -> Answers:
        """Let the ranks of a process set run steps, and return their answers by rank.

        Raises ValueError if a rank could not trace.
        """
        self._traces += 1
        path = str(Path(self._scratch.name, f"{live.name}-{self._traces}"))
        answers = live.request("trace", ranks=self._ranks, steps=steps, what=what, path=path)
        if problem := next(filter(None, (answer.get("problem") for answer in answers.values())), ""):
            raise ValueError(problem)
        return answers

    def keep(self, traces: Mapping[str, str]) -> list[str]:
        """Keep a raw trace of each side, under a name that says so."""
        kept = []
        for side, word in ((BASE, "base"), (CANDIDATE, "candidate")):
            rank = traces[side].rpartition("-")[2]
            path = self._folder / f"{self._name}-{word}-{rank}"
            Path(traces[side]).replace(path)
            kept.append(str(path))
        return kept
