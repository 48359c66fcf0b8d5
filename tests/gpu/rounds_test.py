"""Many rounds: without a wait of the host between them, at each rank's own pace, in any shape."""

import random
import time
from dataclasses import replace
from typing import Any, cast

import torch

from tests.distributed import checks
from tests.distributed.cases import Case, find, random_case
from tests.distributed.checks import Expected, expect
from tests.gpu.ranks import Rank, on_ranks

ROUNDS = 200


def _worst(seed: int, num_ranks: int) -> Expected:
    """A case with results of a fixed size, so that the host need not wait for counts."""
    case = replace(random_case(seed, num_ranks), worst=9, with_topk=True, hidden=128)
    return expect(case)


@on_ranks(counts=(2, 8))
def test_200_rounds_without_a_sync_between_them(rank: Rank) -> None:
    """Everything is queued first and compared afterwards; rows live on the device all along."""
    buffer = rank.buffer()
    chosen = [_worst(seed, rank.size) for seed in range(300, 308)]
    layouts = [checks.layout(buffer, expected) for expected in chosen]
    sent: list[Any] = [checks.payload(buffer, expected) for expected in chosen]
    routing = [
        tuple(part.to("cuda") for part in (mine.topk_idx, mine.topk_weights))
        for mine in (expected.inputs[rank.index] for expected in chosen)
    ]
    outputs = [checks.output_of(buffer, expected, exported=True) for expected in chosen]
    torch.cuda.synchronize()
    queued: list[tuple[int, Any, Any, Any]] = []
    for number in range(ROUNDS):
        which = (7 * number) % len(chosen)
        per_rank, _rdma, per_expert, in_rank, _event = layouts[which]
        result = buffer.dispatch(
            sent[which],
            None,
            per_rank,
            None,
            in_rank,
            per_expert,
            topk_idx=routing[which][0],
            topk_weights=routing[which][1],
            num_worst_tokens=chosen[which].rows(rank.index),
        )
        again = buffer.dispatch(sent[which], handle=result[4])[0] if number % 3 == 0 else None
        biases = chosen[which].inputs[rank.index].biases
        combined = None
        if not biases:
            combined = buffer.combine(outputs[which], result[4])[0]
        queued.append((which, result, again, combined))
    torch.cuda.synchronize()
    for number, (which, result, again, combined) in enumerate(queued):
        expected = chosen[which]
        want, n = expected.dispatched[rank.index], expected.received(rank.index)
        checks.same_payload(f"round {number}", checks.first(result[0], n), want.recv_x)
        checks.same_bits(
            f"round {number}: ids", result[1][:n], cast(torch.Tensor, want.recv_topk_idx)
        )
        if again is not None:
            checks.same_payload(f"round {number}, again", checks.first(again, n), want.recv_x)
        if combined is not None:
            right = expected.combined[rank.index].combined_x
            checks.same_bits(f"round {number}: sums", combined, right)


@on_ranks(counts=(3, 8))
def test_ranks_at_their_own_pace_stay_in_step(rank: Rank) -> None:
    """Each rank dawdles at random places, on the host and on the device."""
    r = random.Random(rank.index)
    chosen = [expect(random_case(seed, rank.size)) for seed in range(200, 206)]
    buffer = rank.buffer()
    handles = [checks.round_trip(buffer, expected) for expected in chosen]

    def dawdle() -> None:
        kind = r.random()
        if kind < 0.2:
            time.sleep(r.choice((0.0001, 0.001, 0.004)))
        elif kind < 0.4:
            cast(Any, torch.cuda)._sleep(r.choice((10_000, 300_000, 3_000_000)))

    for number in range(40):
        expected, handle = chosen[number % 6], handles[number % 6]
        dawdle()
        result = checks.dispatch(buffer, expected)
        dawdle()
        checks.check_dispatched(result, expected, rank.index)
        checks.combine(buffer, expected, result[4])
        dawdle()
        buffer.dispatch(checks.payload(buffer, expected), handle=handle)
        dawdle()
        checks.combine(buffer, expected, handle, exported=True)


@on_ranks(counts=(4,))
def test_shapes_change_from_call_to_call_without_a_clean_up(rank: Rank) -> None:
    """D17: 200 calls, at most 1, 2, 4, 8, 244 tokens, hidden 7168 and 4096 in turn."""
    chosen = [
        expect(
            Case(f"{most}x{hidden}", (most, most // 2, 1, most), hidden, 16, 4, "holes", seed=most)
        )
        for most in (1, 2, 4, 8, 244)
        for hidden in (7168, 4096)
    ]
    # The two largest take most of the time, so they come in the first 40 calls only.
    order = [index % 10 for index in range(40)] + [index % 8 for index in range(160)]
    buffer = rank.buffer()
    for index in order:
        checks.round_trip(buffer, chosen[index])


@on_ranks(
    counts=(2,), choices=["1,1", "3,3", "31,31", "33,33", "127,127", "4095,4095", "4095,4096"]
)
def test_odd_token_counts(rank: Rank, tokens: str) -> None:
    """D10: up to one token fewer than the other rank."""
    first, second = map(int, tokens.split(","))
    checks.round_trip(rank.buffer(), expect(Case("odd", (first, second), 64, 8, 2)))


@on_ranks(counts=(4,))
def test_several_buffers_of_one_group_do_not_meet(rank: Rank) -> None:
    names = ("odd_counts", "holes", "fp8_packed_scales")
    chosen = [expect(replace(find(name, rank.size), hidden=64)) for name in names]
    buffers = [rank.new_buffer() for _ in chosen]
    for _ in range(3):
        for buffer, expected in zip(buffers, chosen, strict=True):
            checks.round_trip(buffer, expected)
    for buffer in buffers:
        buffer.destroy()
