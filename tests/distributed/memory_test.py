"""Memory: results never depend on what was there before, and nothing is written beside them."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepep import Buffer
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks, guards
from tests.distributed.cases import DEVICE, Case, cases_of, find
from tests.distributed.checks import expect

NUM_RANKS = 4
POISON_BYTES = 12 << 20  # most of the pool's first segment


def poison(buffer: Buffer, value: int) -> None:
    """Fills memory that the next results will lie in: ids that look real, floats that are NaN."""
    for _ in range(2):
        buffer.empty(POISON_BYTES // 8, dtype=torch.int64).fill_(value)
    buffer.empty(POISON_BYTES // 4, dtype=torch.float32).fill_(value if value else float("nan"))
    buffer.empty(POISON_BYTES // 16, dtype=torch.int64).fill_(value)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch.empty() gives NaN and the largest integers, so that nothing can rely on zeros."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan(), "torch.utils.deterministic.fill_uninitialized_memory is off"
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", cases_of(NUM_RANKS), ids=str)
def test_results_do_not_depend_on_stale_memory(case: Case, filled_memory: None) -> None:
    """D11, D12: poison in exported memory and in torch's."""
    expected = expect(case)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for value in (3, 0, -1):
                poison(buffer, value)
                checks.round_trip(buffer, expected)

    run_ranks(NUM_RANKS, work)


def test_padding_rows_of_a_fixed_size_hold_no_experts_and_counts_are_on_the_device() -> None:
    """D11: 10 rows of 512 are real."""
    case = Case("padding", (5, 0, 5, 0), 64, 8, 2, "one_rank", worst=502)
    expected = expect(case)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            poison(buffer, 3)
            if group.rank() < 3:
                checks.dispatch(buffer, expected)
                return
            x, ids, weights, per_expert, handle, _ = checks.dispatch(buffer, expected)
            assert isinstance(x, torch.Tensor) and ids is not None and weights is not None
            assert x.shape == (512, 64) and ids.shape == weights.shape == (512, 2)
            assert bool((ids[10:] == -1).all()) and bool((ids[:10] >= 0).all())
            # The host has waited for nothing: the counts are in tensors.
            assert per_expert == [] and handle.num_recv_tokens is None
            assert int(handle.rank_prefix_matrix[-1, 3]) == 10
            assert int(handle.num_recv_tokens_per_expert.sum()) == 20
            for counts in (handle.rank_prefix_matrix, handle.num_recv_tokens_per_expert):
                assert counts.device.type == DEVICE.type and counts.dtype == torch.int32

    run_ranks(NUM_RANKS, work)


@pytest.mark.parametrize("name", ["odd_counts", "fp8_column_scales", "fixed_size", "top32"])
def test_nothing_is_written_beside_the_results(name: str) -> None:
    expected = expect(find(name, NUM_RANKS))

    def work(group: ThreadGroup) -> None:
        rank = group.rank()
        with Buffer(group, timeout=20) as buffer:
            size = guards.exported_bytes(expected, rank, expected.rows(rank))
            between = guards.place(buffer, size)
            x, *_, handle, _ = result = checks.dispatch(buffer, expected)
            checks.combine(buffer, expected, handle, exported=True)
            group.barrier()
            guards.check(between, x)
            checks.check_dispatched(result, expected, rank)

    run_ranks(NUM_RANKS, work)


def test_results_live_as_long_as_their_tensors_do() -> None:
    """Later dispatches, and the end of all Buffers, leave earlier results alone."""
    cases = [replace(find("odd_counts", NUM_RANKS), seed=seed, hidden=64) for seed in range(12)]
    chosen = [expect(case) for case in cases]

    def work(group: ThreadGroup) -> list[Any]:
        with Buffer(group, timeout=20) as buffer:
            return [checks.dispatch(buffer, expected) for expected in chosen]

    results = run_ranks(NUM_RANKS, work)
    gc.collect()
    for rank, mine in enumerate(results):
        for expected, result in zip(chosen, mine, strict=True):
            checks.check_dispatched(result, expected, rank)


def test_memory_in_use_is_what_the_arithmetic_says() -> None:
    """D18: receive_layout() against the bytes that a dispatch holds, each tensor aligned to 256."""
    chosen = [expect(case) for case in cases_of(NUM_RANKS)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for expected in chosen:
                result = checks.dispatch(buffer, expected)
                rows = expected.rows(group.rank())
                right = guards.exported_bytes(expected, group.rank(), rows)
                assert buffer.memory_bytes()["used"] == right
                del result

    run_ranks(NUM_RANKS, work)


def test_destroyed_buffers_leave_no_memory_and_no_threads() -> None:
    expected = expect(find("holes", NUM_RANKS))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            checks.round_trip(buffer, expected)

    def traces() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:deepep")
        files = [
            os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
        ]
        return maps, sum("memfd:deepep" in name for name in files)

    gc.collect()
    before, threads = traces(), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        run_ranks(NUM_RANKS, work)
    gc.collect()
    assert traces() == before
    assert len(os.listdir("/proc/self/task")) <= threads + NUM_RANKS


def test_memory_comes_back_when_results_are_dropped() -> None:
    """D17: shapes come and go, the memory stays what the largest needs."""
    chosen = [expect(case) for case in cases_of(NUM_RANKS)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            reserved = []
            for _ in range(4):
                for expected in chosen:
                    checks.round_trip(buffer, expected)
                assert buffer.memory_bytes()["used"] == 0
                reserved.append(buffer.memory_bytes()["reserved"])
            assert reserved[1:] == reserved[:-1], "memory grows from round to round"

    run_ranks(NUM_RANKS, work)
