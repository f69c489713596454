"""The base class of work that a rank repeats, times and checks."""

from __future__ import annotations


class Measurement:
    """Base class of work that a rank can repeat, time and check.

    max_iterations: the most steps that a round may have.
    """

    max_iterations = 1000

    def warm_up(self, steps: int) -> None:
        """Run about `steps` untimed steps, until all later steps take the same time."""
        for _ in range(steps):
            self.step()

    def start_round(self) -> None:
        """Prepare a timed round, before the clock starts."""

    def begin_timed(self) -> None:
        """Prepare the timed steps of a round, after an untimed step if there is one."""

    def step(self) -> None:
        """Do the work whose duration a rank measures."""
        raise NotImplementedError

    def end_round(self, steps: int) -> None:
        """Check the result of a timed round of `steps` steps, and raise an error if it is wrong."""

    def finish(self) -> dict[str, float]:
        """Check the final state of the measured work, and return the rank's counters by name."""
        return {}
