"""The memory copy: its result is checked, and failing sets leave nothing unread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpperf.instruments.memory_copy import Copy
from ddpperf.specs import CopySpec, Fault
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

SPEC = CopySpec(world_size=1, nbytes=1000)


def copy() -> Copy:
    made = Copy(SPEC, rank=0, device=torch.device("cpu"))
    made.start_round()
    return made


def test_a_wrong_copy_is_found() -> None:
    with pytest.raises(ArithmeticError, match="a copy of 1000 bytes differs from its source after 7 steps"):
        copy().end_round(7)
    made = copy()
    made.step()
    made.target[999] += 1
    with pytest.raises(ArithmeticError):
        made.end_round(1)


@pytest.mark.parametrize("nbytes", [1, 4096, 2**20])
def test_buffers_have_fixed_places_in_their_pages(nbytes: int) -> None:
    for _ in range(3):
        made = Copy(replace(SPEC, nbytes=nbytes), rank=0, device=torch.device("cpu"))
        assert (made.source.data_ptr() % 4096, made.target.data_ptr() % 4096) == (0, 2048)
        assert (len(made.source), len(made.target)) == (nbytes, nbytes)


@pytest.mark.slow
def test_sets_that_fail_together_are_all_replaced() -> None:
    """An unread answer of one set would be taken for its next answer."""
    failing = replace(SPEC, fault=Fault(kind="raise", rank=0, command="open"))
    with Pool(SetOptions(size=1, device="cpu", rounds=2, deadline_seconds=60), replicates=2) as pool:
        before = {sample.set for sample in pool.measure(SPEC).samples}
        with pytest.raises(SetFailure, match=r"rank 0 of set A1 raised .* \(at open\)"):
            pool.measure(failing)
        after = pool.measure(SPEC)
    assert len(after.samples) == 2
    assert not before & {sample.set for sample in after.samples}
    assert all(seconds < 1e-3 for seconds in after.all_step_seconds())
