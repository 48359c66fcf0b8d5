"""Handles: the same routing again, in any order, any number of times, on any payload."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepep import Buffer, reference
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE, Case, cases_of, find, inputs
from tests.distributed.checks import Expected, expect

REPEATED = ["odd_counts", "holes", "idle_ranks", "all_to_one_rank", "nowhere", "fixed_size"]


def again(buffer: Buffer, expected: Expected, handle: Any, other: Case) -> None:
    """A dispatch of the payload of `other` along the routing of `handle`."""
    x = [item.x for item in inputs(other)]
    ids = [item.topk_idx for item in expected.inputs]
    want = reference.dispatch_reference(x, ids, None, expected.case.num_experts)[buffer.rank]
    got, topk_idx, topk_weights, per_expert, same, event = buffer.dispatch(
        checks.on_device(x[buffer.rank]), handle=handle
    )
    assert topk_idx is None and topk_weights is None and per_expert is None
    assert same is handle and event.event is None
    rows = expected.rows(buffer.rank)
    assert (got[0] if isinstance(got, tuple) else got).shape == (rows, other.hidden)
    checks.same_payload("recv_x", checks.first(got, expected.received(buffer.rank)), want.recv_x)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("name", REPEATED)
def test_a_handle_repeats_its_routing_with_any_payload(name: str, num_ranks: int) -> None:
    """Idle ranks (D07) and fixed sizes too. Gradients go the other way: combine, then dispatch."""
    case = find(name, num_ranks)
    expected = expect(case)
    others = [
        replace(case, seed=71),
        replace(case, seed=72, hidden=48, payload="fp8"),
        replace(case, seed=73, hidden=144, payload="fp8_columns"),
        replace(case, seed=74, hidden=512, payload="fp8_ue8m0"),
        replace(case, seed=75, hidden=8),
    ]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            handle = checks.round_trip(buffer, expected)
            for other in others:
                again(buffer, expected, handle, other)
                checks.combine(buffer, expected, handle, exported=other.seed % 2 == 0)
            checks.check_handle(handle, expected, group.rank())

    run_ranks(num_ranks, work)


@pytest.mark.parametrize("seed", range(3))
def test_handles_are_used_in_any_order(seed: int) -> None:
    """Forward and backward of many layers on one Buffer; nothing in a handle is used up."""
    r = random.Random(seed)
    chosen = [expect(case) for case in r.sample(cases_of(4), 6)]
    steps = [(r.randrange(len(chosen)), r.choice(("new", "again", "combine"))) for _ in range(60)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            handles = [checks.round_trip(buffer, expected) for expected in chosen]
            for index, step in steps:
                expected = chosen[index]
                if step == "new":
                    handles[index] = checks.round_trip(buffer, expected)
                elif step == "again":
                    again(buffer, expected, handles[index], replace(expected.case, seed=80 + index))
                else:
                    checks.combine(buffer, expected, handles[index])
            for expected, handle in zip(chosen, handles, strict=True):
                checks.check_handle(handle, expected, group.rank())

    run_ranks(4, work)


def test_what_dispatch_returned_can_be_combined_where_it_lies() -> None:
    """recv_x itself, part of a larger exported tensor, and memory of another Buffer."""
    expected = expect(find("odd_counts", 4))
    received = [result.recv_x for result in expected.dispatched]
    rows = [x for x in received if isinstance(x, torch.Tensor)]
    sums = reference.combine_reference(rows, expected.dispatched)

    def work(group: ThreadGroup) -> None:
        rank, n = group.rank(), expected.received(group.rank())
        with Buffer(group, timeout=20) as buffer, Buffer(group, timeout=20) as other:
            recv_x, _, _, _, handle, _ = checks.dispatch(buffer, expected)
            assert isinstance(recv_x, torch.Tensor)
            larger = buffer.empty(n + 5, 2880)
            larger[3 : n + 3] = recv_x
            foreign = other.empty(n, 2880).copy_(recv_x)
            for x in (recv_x, larger[3 : n + 3], foreign, recv_x.clone()):
                combined, weights, _ = buffer.combine(x, handle)
                assert weights is None
                checks.same_bits("combined_x", combined, sums[rank].combined_x)
                checks.same_payload("x after combine", x, rows[rank])

    run_ranks(4, work)


def test_the_inputs_of_all_calls_stay_as_they_were() -> None:
    expected = expect(FAULT_CASE)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            mine = expected.inputs[group.rank()]
            assert isinstance(mine.x, torch.Tensor)
            given = [mine.x.clone(), mine.topk_idx.clone(), mine.topk_weights.clone()]
            given += [bias.clone() for bias in mine.biases]
            checks.round_trip(buffer, expected)
            now = [mine.x, mine.topk_idx, mine.topk_weights, *mine.biases]
            for before, after in zip(given, now, strict=True):
                checks.same_bits("input", after, before)

    run_ranks(4, work)


def test_a_handle_refuses_other_numbers_of_rows() -> None:
    expected = expect(FAULT_CASE)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            handle = checks.round_trip(buffer, expected)
            n = expected.received(group.rank())
            tokens = FAULT_CASE.tokens[group.rank()]
            with pytest.raises(ValueError, match=f"x has {n + 1} rows.*returned {n};"):
                buffer.combine(torch.zeros((n + 1, 64), dtype=torch.bfloat16), handle)
            x = torch.zeros((tokens + 1, 64), dtype=torch.bfloat16)
            with pytest.raises(ValueError, match=f"x has {tokens + 1} tokens.*routes {tokens};"):
                buffer.dispatch(x, handle=handle)
            checks.combine(buffer, expected, handle)

    run_ranks(4, work)
