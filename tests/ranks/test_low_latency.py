"""The kernel of small all_reduces, by Triton's interpreter in processes that share memory: any length, any number of ranks, and
ranks that are late; and that a GPU of the H200's kind reads and writes its words whole."""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
CALLS = 7
DEADLOCK_SECONDS = 300


def sum_often(
    rank: int, slot: int, sources: list[Tensor], mailboxes: list[Tensor], calls: Tensor, results: Tensor
) -> None:
    """What one rank does, late now and then before it sends, reads or looks for a flag; results: a row for each call."""
    from triton.runtime.interpreter import InterpreterBuilder

    from ddpperf.collectives.low_latency import launch

    load, exchange_or_look = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw
    late, looked = random.Random(rank), False

    def load_late(*arguments: object) -> object:
        time.sleep(late.choice((0.0, 0.0, 0.0, 0.05)))
        return load(*arguments)

    def look_late(builder: object, operation: Any, *arguments: object) -> object:
        nonlocal looked
        if operation.name == "ADD" and not looked:
            looked = True
            time.sleep((rank + call) % 2 * 0.3)  # the others, who have all of this call, begin the next one
        return exchange_or_look(builder, operation, *arguments)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw = load_late, look_late
    N = len(mailboxes)
    addresses = torch.tensor([each.data_ptr() for each in mailboxes])
    for call in range(CALLS):
        looked = False
        source = sources[rank] * (call + 1)
        result = source if call % 2 else torch.full_like(source, -1)
        launch(source, result, mailboxes[rank], addresses, calls, slot=slot, rank=rank, N=N)
        results[call] = result


@pytest.mark.parametrize(("N", "count"), [(2, 1), (3, 300), (4, 128), (2, 2049), (3, 2048)])
def test_every_rank_has_the_same_sum_after_each_of_several_calls(
    N: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words, and in blocks of elements, of which the last is not full."""
    from ddpperf.collectives.low_latency import (
        FLAGGED_BLOCK,
        mailbox_layout,
    )  # before Triton is told to interpret

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of the processes that are started
    blocks, slot, size, dtype = mailbox_layout(count, N, words=count < FLAGGED_BLOCK)
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(count, generator=generator).share_memory_() for _ in range(N)]
    mailboxes = [torch.zeros(size, dtype=dtype).share_memory_() for _ in range(N)]
    results = [torch.zeros(CALLS, count).share_memory_() for _ in range(N)]
    context: Any = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=sum_often,
            args=(rank, slot, sources, mailboxes, torch.zeros(blocks, dtype=torch.int32), results[rank]),
        )
        for rank in range(N)
    ]
    try:
        for each in ranks:
            each.start()
        end = time.monotonic() + DEADLOCK_SECONDS
        while any(each.is_alive() for each in ranks) and all(each.exitcode in (None, 0) for each in ranks):
            assert time.monotonic() < end, "the ranks wait for each other"
            time.sleep(0.05)
        assert [each.exitcode for each in ranks] == [0] * N
    finally:
        for each in ranks:
            each.kill()
    for call in range(CALLS):
        expected = torch.stack(sources).double().sum(0) * (call + 1)
        torch.testing.assert_close(results[0][call].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(results[0][call], each[call]) for each in results)


def test_a_word_is_written_and_read_whole() -> None:
    """Its flag says that its element is there, too, only if no half of it travels by itself."""
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
            "a word of each element to each rank, by 128 threads"
        )
        assert ptx.rindex("st.global.b64") < ptx.index("ld.volatile"), "all are sent before any is waited for"


def place(pattern: str, ptx: str) -> int:
    """Of the first instruction of the kind."""
    found = re.search(pattern, ptx)
    assert found is not None, pattern
    return found.start()


def test_a_blocks_elements_are_there_when_its_flag_is() -> None:
    """Of all threads, for the other GPU: by the memory model, not by luck; and 16 bytes are sent at once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddpperf.collectives.low_latency import FLAGGED_BLOCK, flagged_kernel

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
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    sent, flagged, waited = (
        place(each, ptx) for each in (r"st\.global\.v4\.b32", r"\S*sys\S*release", r"\S*sys\S*acquire")
    )
    assert sent < ptx.rindex("bar.sync", 0, flagged) < flagged < waited < ptx.index("bar.sync", waited)
    assert ptx.index("ld.global.v4.b32", waited) > ptx.index("bar.sync", waited)
