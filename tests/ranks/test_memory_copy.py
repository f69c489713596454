"""The memory copy: its result is checked, and its buffers lie where they do not slow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpperf.instruments.memory_copy import Copy
from ddpperf.specs import CopySpec

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
    made.step()
    made.start_round()
    with pytest.raises(ArithmeticError):  # the last round's copy cannot pass
        made.end_round(1)


@pytest.mark.parametrize("nbytes", [1, 4096, 2**20])
def test_buffers_have_fixed_places_in_their_pages(nbytes: int) -> None:
    for _ in range(3):
        made = Copy(replace(SPEC, nbytes=nbytes), rank=0, device=torch.device("cpu"))
        assert (made.source.data_ptr() % 4096, made.target.data_ptr() % 4096) == (0, 2048)
        assert (len(made.source), len(made.target)) == (nbytes, nbytes)
