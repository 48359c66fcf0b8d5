"""Memory on a GPU: stale contents, neighbours, tensors from elsewhere, and what a Buffer leaves."""

import gc
import os
import sys
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from deepep import Buffer, CapacityError, UnsupportedConfigError, reference
from deepep.cuda_engine import NO_POOL_VARIABLE

from tests.distributed import checks
from tests.distributed.cases import Case, cases_of, find
from tests.distributed.checks import expect
from tests.gpu.ranks import Rank, on_ranks

NAMES = [case.name for case in cases_of(2)]
GUARD = 0x5A


def poison(buffer: Buffer, value: int) -> None:
    """Fills memory that the next results will lie in: ids that look real, floats that are NaN."""
    with buffer.memory_pool():
        # Small results come from blocks of up to 1 MB, larger ones from others.
        held = [torch.full((64 << 10,), value, device="cuda") for _ in range(8)]
        held.append(torch.full((8 << 20,), value, device="cuda"))
        nan = torch.full((16 << 20,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    del held, nan


@on_ranks(counts=(4,), choices=NAMES)
def test_results_do_not_depend_on_stale_memory(rank: Rank, name: str) -> None:
    """D11, D12: poison in the Buffer's memory."""
    buffer, expected = rank.buffer(), expect(find(name, rank.size))
    for value in (3, -1):
        poison(buffer, value)
        checks.round_trip(buffer, expected)


@on_ranks(counts=(2,))
def test_a_pool_that_goes_away_during_an_allocation_harms_nothing(rank: Rank) -> None:
    """The garbage collector comes at every object and finds pools, as it would those of Buffers."""
    cuda: Any = torch.cuda
    buffer, thresholds = rank.buffer(), gc.get_threshold()
    buffer.empty(16)
    try:
        for _ in range(20):
            ring: list[Any] = [cuda.MemPool()]
            ring.append(ring)
            gc.set_threshold(1, 1, 1)
            del ring
            held = [buffer.empty(size) for size in (16, 1 << 20)]
            gc.set_threshold(*thresholds)
            assert all(tensor.is_cuda for tensor in held)
    finally:
        gc.set_threshold(*thresholds)


@on_ranks(counts=(1,))
def test_asking_torch_about_the_pool_keeps_the_number_of_the_pool_alive(rank: Rank) -> None:
    """torch's own question about one pool frees the number under its owner; small ones are safe."""
    cuda: Any = torch.cuda
    while cuda.MemPool().id[1] <= 256:  # Python never frees integers up to 256
        pass
    with rank.new_buffer() as buffer:
        engine: Any = buffer._engine
        number = engine._pool_id[1]
        assert number > 256
        before = sys.getrefcount(number)
        for _ in range(10):
            buffer.memory_bytes()
            assert not engine.is_exported(torch.empty(16, device="cuda"))
            engine._foreign.clear()
        assert sys.getrefcount(number) == before


@on_ranks(counts=(4,))
def test_padding_rows_of_a_fixed_size_hold_no_experts(rank: Rank) -> None:
    """D11: 10 rows of 512 are real; the counts are on the device."""
    expected = expect(Case("padding", (5, 0, 5, 0), 64, 8, 2, "one_rank", worst=502))
    buffer = rank.buffer()
    poison(buffer, 3)
    _, ids, _, per_expert, handle, _ = checks.dispatch(buffer, expected)
    if rank.index == 3:
        assert ids is not None and ids.shape == (512, 2)
        assert bool((ids[10:] == -1).all()) and bool((ids[:10] >= 0).all())
        assert per_expert == [] and handle.num_recv_tokens is None
        assert int(handle.rank_prefix_matrix[-1, 3]) == 10
        assert handle.num_recv_tokens_per_expert.is_cuda


@on_ranks(counts=(2, 8), choices=["odd_counts", "fp8_column_scales", "fixed_size", "top32"])
def test_nothing_is_written_beside_the_results(rank: Rank, name: str) -> None:
    """Results come to lie between tensors of the same pool, none of which may change."""
    expected = expect(find(name, rank.size))
    with rank.new_buffer() as buffer:
        guards: list[torch.Tensor] = []
        for size in (512, 3000, 30_000, 300_000, 3_000_000):
            made = [buffer.empty(size, dtype=torch.uint8).fill_(GUARD) for _ in range(20)]
            guards += made[::2]  # the holes between them are what results will fill
        del made
        kept = []
        for _ in range(3):
            kept.append(checks.dispatch(buffer, expected))
            checks.combine(buffer, expected, kept[-1][4], exported=True)
        torch.cuda.synchronize()
        rank.barrier()
        changed = sum(int((guard != GUARD).sum()) for guard in guards)
        assert changed == 0, f"{changed} guard bytes changed"
        for result in kept:
            checks.check_dispatched(result, expected, rank.index)


@on_ranks(counts=(4,))
def test_rows_are_combined_wherever_they_lie(rank: Rank) -> None:
    """recv_x itself, the pool, part of a larger tensor, another Buffer's, plain memory."""
    expected = expect(find("odd_counts", rank.size))
    rows = [cast(torch.Tensor, result.recv_x) for result in expected.dispatched]
    want = reference.combine_reference(rows, expected.dispatched)[rank.index].combined_x
    n = expected.received(rank.index)
    with rank.new_buffer() as buffer, rank.new_buffer() as other:
        received, _, _, _, handle, _ = checks.dispatch(buffer, expected)
        assert isinstance(received, torch.Tensor)
        with buffer.memory_pool():
            pooled = received + 0
        larger = buffer.empty(n + 5, 2880)
        larger[3 : n + 3] = received
        foreign = other.empty(n, 2880).copy_(received)
        for x in (received, pooled, larger[3 : n + 3], foreign, received.clone()):
            before = x.clone()
            combined, _, _ = buffer.combine(x, handle)
            checks.same_bits("combined", combined, want)
            assert torch.equal(x, before), "combine changed its input"


@on_ranks(counts=(4,))
def test_new_memory_is_opened_by_peers_and_old_memory_is_let_go(rank: Rank) -> None:
    """Tensors come and go, torch's cache is emptied, and addresses come back as other memory."""
    expected = expect(find("plain", rank.size))
    with rank.new_buffer() as buffer:
        for number in range(12):
            handle = checks.round_trip(buffer, expected)
            ballast = buffer.empty((1 + number % 3) << 20, 4)
            outputs = checks.output_of(buffer, expected, exported=True)
            combined, _, _ = buffer.combine(outputs, handle)
            checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)
            del handle, ballast, outputs, combined
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()


@on_ranks(counts=(2,))
def test_memory_that_took_the_place_of_freed_memory_is_told_from_it(rank: Rank) -> None:
    """Peers have the freed allocation open; what now lies at its address is another one."""
    expected = expect(find("plain", rank.size))
    n, hidden = expected.rows(rank.index), expected.case.hidden
    with rank.new_buffer() as buffer:
        handle, domain = checks.round_trip(buffer, expected), buffer._engine.domain
        seen: set[int] = set()
        for _ in range(8):
            block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # of torch's own pool
            address = block.data_ptr()
            assert not domain.exports(address, 64 << 20), "it was never exported"
            seen.add(address)
            domain.export_allocation(address)
            assert domain.exports(address, 64 << 20)
            x = block[: n * hidden * 2].view(torch.bfloat16).view(n, hidden)
            x.copy_(checks.output_of(buffer, expected, exported=False))
            combined = buffer.combine(x, handle)[0]
            checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)
            torch.cuda.synchronize()
            rank.barrier()
            del x, block
            gc.collect()
            torch.cuda.empty_cache()
        assert len(seen) < 8, "no address came back, so nothing was tested"


@on_ranks(counts=(1, 4), choices=["plain", "fp8_column_scales", "fixed_size", "odd_counts"])
def test_a_torch_without_memory_pools_serves_too(rank: Rank, name: str) -> None:
    """Results come from the Buffer's own pool then; memory comes back when they are dropped."""
    expected = expect(find(name, rank.size))
    os.environ[NO_POOL_VARIABLE] = "1"
    try:
        with rank.new_buffer() as buffer:
            for _ in range(3):
                handle = checks.round_trip(buffer, expected)
                outputs = checks.output_of(buffer, expected, exported=True)
                assert outputs.numel() == 0 or buffer._engine.is_exported(outputs)
                del handle, outputs
            torch.cuda.synchronize()
            gc.collect()
            assert buffer.memory_bytes()["used"] == 0 < buffer.memory_bytes()["reserved"]
    finally:
        del os.environ[NO_POOL_VARIABLE]


@on_ranks(counts=(2,), choices=["plain", "fp8_column_scales", "fixed_size"])
def test_memory_with_fabric_handles_serves_too(rank: Rank, name: str) -> None:
    """Skipped where the machine has no NVLink domain with IMEX; that too is told in words."""
    try:
        buffer = rank.new_buffer(use_fabric=True)
    except UnsupportedConfigError as error:
        for part in ("use_fabric=True on cuda", "IMEX", "Leave use_fabric out"):
            assert part in str(error), str(error)
        pytest.skip(str(error))
    with buffer:
        for _ in range(3):
            checks.round_trip(buffer, expect(find(name, rank.size)))


@on_ranks(counts=(4,))
def test_results_outlive_their_buffer(rank: Rank) -> None:
    cases = [replace(find("odd_counts", rank.size), seed=seed, hidden=64) for seed in range(6)]
    chosen = [expect(case) for case in cases]
    with rank.new_buffer() as buffer:
        results = [checks.dispatch(buffer, expected) for expected in chosen]
    gc.collect()
    for expected, result in zip(chosen, results, strict=True):
        checks.check_dispatched(result, expected, rank.index)


@on_ranks(counts=(4,))
def test_buffers_leave_no_memory_behind(rank: Rank) -> None:
    """After the first ones, device memory stays what it was."""
    expected, free = expect(find("holes", rank.size)), []
    for _ in range(6):
        with rank.new_buffer() as buffer:
            checks.round_trip(buffer, expected)
        del buffer
        gc.collect()
        torch.cuda.empty_cache()
        rank.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        rank.barrier()
    lost = free[2] - free[-1]
    assert lost < 16 << 20, f"{lost >> 20} MB less after three more Buffers: {free}"


@on_ranks(counts=(2,))
def test_a_call_over_capacity_is_refused_and_the_next_one_works(rank: Rank) -> None:
    """D16: 129 tokens, then 128, with a limit of 128; the other rank is not left waiting."""
    fits, over = expect(Case("fits", (128, 5), 64)), expect(Case("over", (129, 5), 64))
    with rank.new_buffer(max_tokens_per_rank=128) as buffer:
        if rank.index == 0:
            with pytest.raises(CapacityError, match=r"129 tokens.*max_tokens_per_rank=128"):
                checks.dispatch(buffer, over)
        handle = checks.round_trip(buffer, fits)
        if rank.index == 0:
            x: Any = over.inputs[0].x.cuda()  # type: ignore[union-attr]
            with pytest.raises(CapacityError, match=r"129 tokens.*max_tokens_per_rank=128"):
                buffer.dispatch(x, handle=handle)
        checks.round_trip(buffer, fits)
