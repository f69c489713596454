"""The low-latency all-reduce by Triton's interpreter, in processes that share memory, with late
ranks.

Also checks the instructions compiled for an H100: 16 bytes at once, and in each phase all stores come
before the wait.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
CALLS = 7
BLOCK = 128  # elements for each thread block
AROUND = 64  # elements before and after a buffer, which the kernels may neither read nor write
DEADLOCK_SECONDS = 300
EMPTY = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # the NaN that means "not arrived yet"


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets its kernels; it is started with the variable for this."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            executor.submit(int).result()  # starts the process
        yield executor


def sum_often(
    phases: int,
    rank: int,
    sources: list[Tensor],
    mailboxes: list[Tensor],
    slots: Tensor,
    results: Tensor,
) -> None:
    """Be one rank that is sometimes late. In each call, another rank is late before its stores.

    results: has a row for each call, with the elements around the result.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    from ddpperf.collectives.low_latency import launch

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    late, call = random.Random(rank), 0

    def load_late(*arguments: object) -> object:
        time.sleep(late.choice((0.0, 0.0, 0.0, 0.05)))
        return load(*arguments)

    def store_late(*arguments: object) -> object:
        time.sleep(0.1 * (call % len(sources) == rank))
        return store(*arguments)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load_late, store_late
    addresses = torch.tensor([mailbox.data_ptr() for mailbox in mailboxes])
    inside = slice(AROUND, -AROUND)
    for call in range(CALLS):
        source = torch.full_like(results[call], 1e9)
        source[inside] = sources[rank] * (call + 1)
        result = source if call % 2 else torch.full_like(source, 1e9)
        launch(phases, BLOCK, source[inside], result[inside], mailboxes[rank], addresses, slots, rank)
        results[call] = result


def sums_of_ranks(phases: int, N: int, count: int) -> tuple[list[list[float]], list[Any]]:
    """Sum on N forked processes; returns the sources, and the results by rank and call.

    The first element of rank 0 has the bits of EMPTY.
    """
    from ddpperf.collectives.low_latency import layout

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    blocks, _, size = layout(phases, BLOCK, count, N)
    sources = [torch.randn(count, generator=generator).share_memory_() for _ in range(N)]
    sources[0][0] = EMPTY
    mailboxes = [torch.full((size,), -1, dtype=torch.int32).share_memory_() for _ in range(N)]
    results = [torch.zeros(CALLS, AROUND + count + AROUND).share_memory_() for _ in range(N)]
    context: Any = multiprocessing.get_context("fork")  # this process has imported Triton
    ranks = [
        context.Process(
            target=sum_often,
            args=(phases, rank, sources, mailboxes, torch.zeros(blocks, dtype=torch.int32), results[rank]),
        )
        for rank in range(N)
    ]
    try:
        for process in ranks:
            process.start()
        end = time.monotonic() + DEADLOCK_SECONDS
        while any(process.is_alive() for process in ranks) and all(
            process.exitcode in (None, 0) for process in ranks
        ):
            assert time.monotonic() < end, "the ranks wait for each other"
            time.sleep(0.05)
        assert [process.exitcode for process in ranks] == [0] * N
    finally:
        for process in ranks:
            process.kill()
    return [source.tolist() for source in sources], [result.tolist() for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(("N", "count"), [(4, 3), (3, 100), (4, 600)])
@pytest.mark.parametrize("phases", [1, 2])
def test_late_ranks_have_the_same_sums(
    interpreter: ProcessPoolExecutor, phases: int, N: int, count: int
) -> None:
    """Check fewer elements than ranks, one block and several, and an element with EMPTY's bits."""
    sources, results = map(torch.tensor, interpreter.submit(sums_of_ranks, phases, N, count).result())
    assert results.shape == (N, CALLS, AROUND + count + AROUND)
    assert (results[:, :, :AROUND] == 1e9).all()
    assert (results[:, :, -AROUND:] == 1e9).all()
    results = results[:, :, AROUND:-AROUND]
    assert results[:, :, 0].isnan().all()
    sources, results = sources[:, 1:], results[:, :, 1:]
    assert torch.equal(results, results[:1].expand_as(results))
    factors = torch.arange(1, CALLS + 1).double()[:, None]
    torch.testing.assert_close(results[0].double(), sources.double().sum(0) * factors, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("small", "aligned"), [(True, True), (False, False)])
@pytest.mark.parametrize("N", [3, 8])
@pytest.mark.parametrize("phases", [1, 2])
def test_kernel_sends_16_bytes_before_it_waits(phases: int, N: int, small: bool, aligned: bool) -> None:
    """If each rank waited before it sends, all would wait for ever.

    small: whether the thread blocks are small. aligned: whether the addresses of the buffers,
    and their length, are multiples of 16. The addresses of the mailboxes always are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddpperf.collectives import low_latency

    types = {
        **{"source": "*fp32", "result": "*fp32", "mailbox": "*i32", "mailboxes": "*i64", "slots": "*i32"},
        **{"count": "i32", "part": "i32", "rank": "i32"},
    }
    multiples = {"mailbox", "mailboxes", "slots", "part"} | (
        {"source", "result", "count"} if aligned else set()
    )
    attributes = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(types) if name in multiples
    }
    ROWS, block = triton.next_power_of_2(N), low_latency.SMALL_BLOCK if small else low_latency.BLOCK
    constants = {"N": N, "PHASES": phases, "ROWS": ROWS, "BLOCK": block}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(low_latency.low_latency_all_reduce, types, constants, attributes)
    options = {"num_warps": block // low_latency.ELEMENTS_PER_THREAD // 32}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

    assert set(re.findall(r"ld\.volatile\.\S+", ptx)) == {"ld.volatile.global.v4.b32"}
    waits = places(r"ld\.volatile", ptx)
    sends = [place for place in places(r"st\.global\.v4\.b32", ptx) if place < waits[-1]]
    before_waiting = sum(place < waits[0] for place in sends)
    if phases == 1:  # the buffer to all, and a slot made EMPTY
        assert before_waiting == len(sends) == 2 * ROWS
        assert len(waits) == 2 * ROWS, "one load of each row, and one in the loop that waits"
        results = 1
    else:  # parts to all, and two halves of a slot made EMPTY; then the sums
        assert (before_waiting, len(sends)) == (3 * ROWS, 4 * ROWS)
        assert len(waits) == 4 * ROWS
        assert sends[-1] < waits[2 * ROWS], "all sums are sent before one is awaited"
        results = ROWS
    # Besides the result, one number is stored: that of the slot.
    assert len(places(r"st\.global\.b32", ptx)) == 1 + 4 * results * (not aligned)


def places(pattern: str, ptx: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, ptx)]
