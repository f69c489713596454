"""The low-latency all-reduce by Triton's interpreter, in processes that share memory, with late
ranks.

And the instructions compiled for an H200: words are written and read as a whole, flags follow
elements.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
CALLS = 7
TRIAL_BLOCK = 128  # elements for each thread block
DEADLOCK_SECONDS = 300


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets its kernels; it is started with the variable for this."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            executor.submit(int).result()  # starts the process
        yield executor


def sum_often(
    launch: Callable[..., None],
    rank: int,
    sources: list[Tensor],
    mailboxes: list[Tensor],
    calls: Tensor,
    results: Tensor,
) -> None:
    """Be one rank that is sometimes late: before it sends, reads or checks a flag.

    launch: launches the kernel. results: has a row for each call.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    load, exchange_or_check = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw
    late, checked = random.Random(rank), False

    def load_late(*arguments: object) -> object:
        time.sleep(late.choice((0.0, 0.0, 0.0, 0.05)))
        return load(*arguments)

    def check_late(builder: object, operation: Any, *arguments: object) -> object:
        nonlocal checked
        if operation.name == "ADD" and not checked:
            checked = True
            time.sleep((rank + call) % 2 * 0.3)  # ranks that have all of this call begin the next one
        return exchange_or_check(builder, operation, *arguments)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw = load_late, check_late
    addresses = torch.tensor([mailbox.data_ptr() for mailbox in mailboxes])
    for call in range(CALLS):
        checked = False
        source = sources[rank] * (call + 1)
        result = source if call % 2 else torch.full_like(source, -1)
        launch(source, result, mailboxes[rank], addresses, calls, rank)
        results[call] = result


def sums_of_ranks(N: int, count: int) -> tuple[list[list[float]], list[Any]]:
    """Sum on N forked processes; returns the sources, and the results by rank and call."""
    from ddpperf.collectives.low_latency import FLAGGED_BLOCK, launch, mailbox_layout

    blocks, size, dtype = mailbox_layout(count, N, words=count < FLAGGED_BLOCK)
    return results_of(launch, N, count, blocks, torch.zeros(size, dtype=dtype))


def sums_by_trial(kernel: str, N: int, count: int) -> tuple[list[list[float]], list[Any]]:
    """Sum as sums_of_ranks does, by a kernel that is on trial."""
    from perf import trial_all_reduce

    blocks, _, size = trial_all_reduce.layout(kernel, count, N, TRIAL_BLOCK)
    launch = partial(trial_all_reduce.launch, kernel, TRIAL_BLOCK)
    return results_of(launch, N, count, blocks, torch.full((size,), -1, dtype=torch.int32))


def results_of(
    launch: Callable[..., None], N: int, count: int, blocks: int, mailbox: Tensor
) -> tuple[list[list[float]], list[Any]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(count, generator=generator).share_memory_() for _ in range(N)]
    mailboxes = [mailbox.clone().share_memory_() for _ in range(N)]
    results = [torch.zeros(CALLS, count).share_memory_() for _ in range(N)]
    context: Any = multiprocessing.get_context("fork")  # this process has imported Triton
    ranks = [
        context.Process(
            target=sum_often,
            args=(launch, rank, sources, mailboxes, torch.zeros(blocks, dtype=torch.int32), results[rank]),
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


@pytest.mark.parametrize(("N", "count"), [(2, 1), (3, 300), (4, 128), (2, 4096), (3, 4097)])
def test_late_ranks_have_the_same_sums(interpreter: ProcessPoolExecutor, N: int, count: int) -> None:
    """In words, and in blocks of elements, of which the last is not full."""
    sources, results = map(torch.tensor, interpreter.submit(sums_of_ranks, N, count).result())
    assert results.shape == (N, CALLS, count)
    assert_sums(sources, results)


@pytest.mark.parametrize(("N", "count"), [(2, 1), (3, 300), (4, 1001)])
@pytest.mark.parametrize("kernel", ["one_phase", "two_phase"])
def test_kernels_on_trial_have_the_same_sums(
    interpreter: ProcessPoolExecutor, kernel: str, N: int, count: int
) -> None:
    sources, results = map(torch.tensor, interpreter.submit(sums_by_trial, kernel, N, count).result())
    assert_sums(sources, results)


def assert_sums(sources: Tensor, results: Tensor) -> None:
    """All ranks have the same sums, which are right."""
    assert torch.equal(results, results[:1].expand_as(results))
    factors = torch.arange(1, CALLS + 1).double()[:, None]
    torch.testing.assert_close(results[0].double(), sources.double().sum(0) * factors, rtol=1e-5, atol=1e-5)


def test_words_are_written_and_read_whole() -> None:
    """Else the flag could arrive before the element."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddpperf.collectives.low_latency import WORDS_BLOCK, words_kernel

    pointers = {"source": "*fp32", "result": "*fp32", "mailbox": "*i64", "mailboxes": "*i64", "calls": "*i32"}
    whole = dict.fromkeys(("count", "slot", "rank"), "i32")
    constants = {"N": 4, "ROWS": 4, "BLOCK": WORDS_BLOCK}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place in range(len(pointers) + 2)
    }  # as by torch's allocator
    for attributes in ({}, aligned):
        types = {**pointers, **whole, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(words_kernel, types, constants, attributes)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert set(re.findall(r"ld\.volatile\.\S*\.(b\d+)", ptx)) == {"b64"}
        assert len(re.findall(r"st\.global\.b64", ptx)) == WORDS_BLOCK * 4 / 128, (
            "one word per element and rank, by 128 threads"
        )
        assert ptx.rindex("st.global.b64") < ptx.index("ld.volatile"), (
            "all words are sent before any is awaited"
        )


def place(pattern: str, ptx: str) -> int:
    """Return where the first matching instruction is."""
    found = re.search(pattern, ptx)
    assert found is not None, pattern
    return found.start()


def test_flag_arrives_after_its_elements() -> None:
    """By the memory model, for all threads and the other GPU; 16 bytes are sent at once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddpperf.collectives.low_latency import FLAGGED_BLOCK, FLAGGED_WARPS, flagged_kernel

    pointers = {
        "source": "*fp32",
        "result": "*fp32",
        "mailbox": "*fp32",
        "mailboxes": "*i64",
        "calls": "*i32",
    }
    constants = {"N": 2, "BLOCK": FLAGGED_BLOCK}
    types = {
        **pointers,
        **dict.fromkeys(("count", "slot", "rank"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(len(pointers) + 2)}
    source = ASTSource(flagged_kernel, types, constants, aligned)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": FLAGGED_WARPS}
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    store = r"st\.global\.v4\.b32"
    sent, flagged, waited = (
        place(pattern, ptx) for pattern in (store, r"\S*sys\S*release", r"\S*sys\S*acquire")
    )
    assert len(re.findall(store, ptx)) == 2 * FLAGGED_BLOCK / 4 / (32 * FLAGGED_WARPS), (
        "each element is written to the other rank and to the result, 4 at once, by all threads"
    )
    assert sent < ptx.rindex("bar.sync", 0, flagged) < flagged < waited < ptx.index("bar.sync", waited)
    assert ptx.index("ld.global.v4.b32", waited) > ptx.index("bar.sync", waited)
