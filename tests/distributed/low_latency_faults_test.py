"""Low-latency mode when ranks are late, dead, masked, or disagree, and when hooks are misused."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from deepep import Buffer, BufferStateError, CommTimeoutError, RankMismatchError
from deepep import low_latency_reference as reference
from deepep.errors import UnsupportedConfigError
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed.low_latency_cases import (
    Shape,
    check_received,
    check_round,
    expert_outputs,
    place_rows,
    send,
    tokens_of,
)

SHAPE = Shape(tokens=6, max_tokens=8, hidden=144, topk=2, experts=7)
ODD = 1  # the rank that misbehaves


def make(group: ThreadGroup, timeout: float = 20, shrink: bool = False, size: int = -1) -> Buffer:
    if size < 0:
        size = Buffer.get_low_latency_rdma_size_hint(64, 512, group.size(), 64)
    return Buffer(
        group, 0, size, low_latency_mode=True, enable_shrink=shrink, timeout=timeout, device="cpu"
    )


# ---- Late and dead ranks


@pytest.mark.parametrize("hook", [False, True], ids=["direct", "hook"])
def test_a_rank_that_does_not_come_is_named_and_reset_brings_all_back(hook: bool) -> None:
    shape = SHAPE.but(hook=hook)

    def work(group: ThreadGroup) -> None:
        with make(group, timeout=3) as buffer:
            check_round(buffer, shape, 0)
            if group.rank() == ODD:
                time.sleep(5)
            else:
                with pytest.raises(CommTimeoutError) as caught:
                    check_round(buffer, shape, 1)
                assert caught.value.operation == "low_latency_dispatch"
                assert caught.value.missing_ranks == (ODD,)
                assert f"rank {ODD}" in str(caught.value)
                with pytest.raises(BufferStateError, match=r"reset\(\)"):
                    check_round(buffer, shape, 1)
            buffer.reset()
            for seed in range(2, 6):
                check_round(buffer, shape, seed)

    run_ranks(4, work)


def test_a_late_rank_within_the_timeout_is_waited_for_and_its_time_is_counted() -> None:
    def work(group: ThreadGroup) -> None:
        held = [tokens_of(SHAPE, rank, 0) for rank in range(group.size())]
        mine = held[group.rank()]
        for hook in (False, True):
            with make(group) as buffer:
                waited = torch.zeros(group.size(), dtype=torch.int64)
                group.barrier()
                if group.rank() == ODD:
                    time.sleep(1)
                shape = SHAPE.but(hook=hook)
                result = send(buffer, shape, mine, dispatch_wait_recv_cost_stats=waited)
                if result[4] is not None:
                    result[4]()
                check_received(shape, group.rank(), held, result)
                if group.rank() != ODD:  # nanoseconds; a rank's own are none
                    assert waited[ODD] > 3e8 and waited[ODD] >= waited.max()

    run_ranks(3, work)


def test_counts_are_added_to_the_statistics() -> None:
    def work(group: ThreadGroup) -> None:
        with make(group) as buffer:
            held = [tokens_of(SHAPE, rank, 0) for rank in range(group.size())]
            num_local = len(
                reference.dispatch([h.x for h in held], [h.ids for h in held], 7)[group.rank()].rows
            )
            stats = torch.full((num_local,), 100, dtype=torch.int32)
            total = torch.full((num_local,), 100, dtype=torch.int32)
            for seed in range(3):
                mine = tokens_of(SHAPE, group.rank(), seed)
                result = send(buffer, SHAPE, mine, cumulative_local_expert_recv_stats=stats)
                total += result[1]
            assert torch.equal(stats, total)

    run_ranks(3, work)


# ---- Ranks that are left out


def without(
    shape: Shape, absent: int, num_ranks: int, rank: int, seed: int
) -> tuple[list[reference.ExpertRows], list[torch.Tensor], torch.Tensor]:
    """What is expected of a round in which `absent` takes no part: nothing of it arrives, and
    selections of its experts add nothing."""
    held = [tokens_of(shape, source, seed) for source in range(num_ranks)]
    held[absent].ids.fill_(-1)
    cast = [tokens.x for tokens in held]
    expected = reference.dispatch(cast, [tokens.ids for tokens in held], shape.experts)
    outputs = expert_outputs(shape, expected)
    heard = [rows if r != absent else [part[:0] for part in rows] for r, rows in enumerate(outputs)]
    sums = reference.combine(heard, expected, [t.weights for t in held], shape.hidden)
    return expected, outputs[rank], sums[rank]


@pytest.mark.parametrize("hook", [False, True], ids=["at once", "hook"])
def test_a_buffer_that_may_shrink_goes_on_without_a_dead_rank(hook: bool) -> None:
    shape = SHAPE.but(cast="bf16", hook=hook)
    others_are_done = threading.Barrier(4, timeout=60)
    seeds = (4, 8, 12, 16, 20)
    # Known before anything is sent: a rank that is busy with Python would count as dead.
    known = {
        (seed, rank): without(shape, ODD, 4, rank, seed) for seed in seeds for rank in range(4)
    }

    def round_without(buffer: Buffer, seed: int) -> None:
        expected, rows, wanted = known[seed, buffer.rank]
        mine = tokens_of(shape, buffer.rank, seed)
        result = send(buffer, shape, mine)
        if result[4] is not None:
            result[4]()
        assert result[1].tolist() == expected[buffer.rank].counts
        assert torch.equal(result[2][1], expected[buffer.rank].layout_range)
        for e, part in enumerate(expected[buffer.rank].rows):
            assert torch.equal(result[0][e, : len(part)], part)  # type: ignore[index]
        x = place_rows(buffer, shape, rows, result)
        combined, _, receive = buffer.low_latency_combine(
            x, mine.ids, mine.weights, result[2], return_recv_hook=hook
        )
        if receive is not None:
            receive()
        assert torch.equal(combined, wanted)

    def work(group: ThreadGroup) -> None:
        with make(group, timeout=5, shrink=True) as buffer:
            check_round(buffer, shape, 0)
            group.barrier()
            if group.rank() != ODD:
                round_without(buffer, seeds[0])
                start = time.monotonic()
                for seed in seeds[1:]:
                    round_without(buffer, seed)
                assert time.monotonic() - start < 5, "a masked rank is not waited for"
                status = torch.full((4,), 7, dtype=torch.int32)
                buffer.low_latency_query_mask_buffer(status)
                assert status.tolist() == [int(rank == ODD) for rank in range(4)]
            others_are_done.wait()
            # Alive after all: all take it in again.
            buffer.reset()
            buffer.low_latency_clean_mask_buffer()
            group.barrier()
            for seed in range(3):
                check_round(buffer, shape, seed)

    # Around all threads: what is done with warnings is a matter of the process.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(4, work)
    told = sorted(str(warning.message) for warning in caught if warning.category is RuntimeWarning)
    assert len(told) == 3
    for text, rank in zip(told, (0, 2, 3), strict=True):
        assert f"Ranks [{ODD}] did not come" in text and f"masked on rank {rank}" in text


def test_masks_are_set_by_hand_and_read_back() -> None:
    with Buffer(None, 0, 0, low_latency_mode=True, enable_shrink=True, device="cpu") as buffer:
        status = torch.empty(1, dtype=torch.int32)
        buffer.low_latency_update_mask_buffer(0, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [1]
        buffer.low_latency_update_mask_buffer(0)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0]
        with pytest.raises(ValueError, match="rank_to_mask is 1, but must be 0 to 0"):
            buffer.low_latency_update_mask_buffer(1)
    with Buffer(None, 0, 0, low_latency_mode=True, device="cpu") as buffer:
        for call in (
            buffer.low_latency_clean_mask_buffer,
            lambda: buffer.low_latency_update_mask_buffer(0),
            lambda: buffer.low_latency_query_mask_buffer(status),
        ):
            with pytest.raises(BufferStateError, match="enable_shrink=True"):
                call()


# ---- Ranks that disagree


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden": 160}, "row_bytes is"),
        ({"experts": 8}, "num_experts is"),
        ({"topk": 3}, "num_topk is"),
        ({"max_tokens": 9}, "num_max_dispatch_tokens_per_rank is"),
        ({"cast": "ue8m0"}, "num_scales is"),
        ({"index": torch.int32}, "index_type is"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("hook", [False, True], ids=["direct", "hook"])
def test_contradictions_are_told_on_every_rank(
    change: dict[str, object], words: str, hook: bool
) -> None:
    base = SHAPE.but(hidden=256, hook=hook)

    def work(group: ThreadGroup) -> None:
        with make(group, timeout=5) as buffer:
            shape = base.but(**change) if group.rank() == ODD else base
            with pytest.raises((RankMismatchError, CommTimeoutError)) as caught:
                result = send(buffer, shape, tokens_of(shape, group.rank(), 0))
                if result[4] is not None:
                    result[4]()
            if isinstance(caught.value, RankMismatchError):
                assert words in str(caught.value)
            assert isinstance(caught.value, RankMismatchError) or group.size() > 2
            buffer.reset()
            for seed in range(3):
                check_round(buffer, base, seed)

    run_ranks(2, work)


def test_workspaces_of_different_sizes_are_refused() -> None:
    def work(group: ThreadGroup) -> None:
        size = 10_000_000 + group.rank() * 256
        with pytest.raises(UnsupportedConfigError, match=r"num_rdma_bytes differs.*10000000"):
            make(group, size=size)
        with pytest.raises(UnsupportedConfigError, match="enable_shrink differs"):
            make(group, shrink=group.rank() == 0)

    run_ranks(2, work)


def test_a_workspace_that_is_too_small_is_refused_with_the_size_that_is_enough() -> None:
    def work(group: ThreadGroup) -> None:
        shape = SHAPE.but(hook=True)
        need = Buffer.get_low_latency_rdma_size_hint(
            shape.max_tokens, shape.hidden, group.size(), shape.experts
        )
        with make(group, size=0) as buffer:
            check_round(buffer, SHAPE.but(rows="exported"), 0)  # needs none of it
            mine = tokens_of(shape, group.rank(), 0)
            with pytest.raises(ValueError, match=rf"num_rdma_bytes.*at least {need}"):
                send(buffer, shape, mine)
            check_round(buffer, SHAPE.but(rows="exported"), 1)
            with pytest.raises(ValueError, match=rf"num_rdma_bytes.*at least {need}"):
                check_round(buffer, SHAPE, 2)
            check_round(buffer, SHAPE.but(rows="zero_copy"), 3)

    run_ranks(2, work)


# ---- Hooks


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(BufferStateError, match=words):
        call()


def test_hooks_are_called_once_and_before_the_next_of_their_kind() -> None:
    shape = SHAPE.but(hook=True)

    def work(group: ThreadGroup) -> None:
        with make(group) as buffer:
            mine = tokens_of(shape, group.rank(), 0)
            result = send(buffer, shape, mine)
            hook = result[4]
            assert hook is not None
            refused(lambda: send(buffer, shape, mine), "low_latency_dispatch.*waits for its hook")
            hook()
            refused(hook, "called before")
            late = send(buffer, shape, mine)[4]
            assert late is not None
            refused(hook, "called before")
            group.barrier()
            buffer.reset()
            refused(late, r"reset\(\) came between")
            for seed in range(3):
                check_round(buffer, shape, seed)

    run_ranks(3, work)


def test_two_micro_batches_are_on_their_way_at_once() -> None:
    """A combine of one batch and a dispatch of the other, received in either order."""
    shape = SHAPE.but(hook=True)

    def work(group: ThreadGroup) -> None:
        delays = random.Random(group.rank())
        with make(group) as buffer:
            num_ranks, rank = group.size(), group.rank()
            held = [[tokens_of(shape, r, seed) for r in range(num_ranks)] for seed in range(13)]
            result = send(buffer, shape, held[0][rank])
            assert result[4] is not None
            result[4]()
            for step in range(12):
                expected = check_received(shape, rank, held[step], result)
                outputs = expert_outputs(shape, expected)
                x = place_rows(buffer, shape, outputs[rank], result)
                mine = held[step][rank]
                combined, _, finish = buffer.low_latency_combine(
                    x, mine.ids, mine.weights, result[2], return_recv_hook=True
                )
                time.sleep(delays.random() * 0.01)
                result = send(buffer, shape, held[step + 1][rank])
                assert finish is not None and result[4] is not None
                for receive in (finish, result[4]) if step % 2 else (result[4], finish):
                    receive()
                    time.sleep(delays.random() * 0.01)
                weights = [tokens.weights for tokens in held[step]]
                wanted = reference.combine(outputs, expected, weights, shape.hidden)[rank]
                assert torch.equal(combined, wanted)

    run_ranks(4, work)


def test_ranks_that_run_ahead_overwrite_nothing() -> None:
    """Every mode in one random order, the same on all ranks, with delays of their own."""
    modes = [SHAPE.but(hook=hook, rows=rows) for hook in (0, 1) for rows in ("foreign", "exported")]

    def work(group: ThreadGroup) -> None:
        order, delays = random.Random(5), random.Random(group.rank())
        with make(group) as buffer:
            for seed in range(80):
                check_round(buffer, order.choice(modes), seed)
                if delays.random() < 0.2:
                    time.sleep(delays.random() * 0.02)

    run_ranks(4, work)
