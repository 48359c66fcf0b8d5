"""Low latency: nothing is written beside the results, and nothing is dropped too early."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from deepep import Buffer, blocks, fp8
from deepep import low_latency_reference as reference
from deepep.testing import ThreadGroup, run_processes, run_ranks

from tests.distributed import guards
from tests.distributed import low_latency_cases as cases
from tests.distributed.low_latency_cases import BASE, MODES, Shape, check_round

RANKS = 3


def make(group: Any, shape: Shape) -> Buffer:
    size = Buffer.get_low_latency_rdma_size_hint(
        shape.max_tokens, shape.hidden, group.size(), shape.experts
    )
    return Buffer(group, 0, size, low_latency_mode=True, timeout=30, device="cpu")


def fenced(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of zeros in the middle of a larger one of guards."""
    wide = torch.full((3 * count,), guards.GUARD, dtype=dtype)
    wide[count : 2 * count] = 0
    return wide, wide[count : 2 * count]


def check_fence(wide: torch.Tensor, what: str) -> None:
    count = len(wide) // 3
    for part in (wide[:count], wide[2 * count :]):
        assert bool((part == guards.GUARD).all()), f"something was written beside {what}"


def received_bytes(shape: Shape, num_local: int, num_ranks: int) -> int:
    """Of what a dispatch receives into, in one piece of exported memory."""
    rows = num_ranks * shape.max_tokens
    packed = fp8.scale_layout(0, shape.hidden, "ue8m0" if shape.cast == "ue8m0" else "float32")
    num_scales = 0 if shape.cast == "bf16" else packed.shape[1]
    dtype = torch.bfloat16 if shape.cast == "bf16" else torch.float8_e4m3fn
    return blocks.num_bytes(
        [
            ((num_local, rows, shape.hidden), dtype),
            ((num_local, num_scales, rows), torch.float32),
            ((num_local, rows), torch.int64),
        ]
    )


def _guarded(group: ThreadGroup, shape: Shape) -> None:
    rank, num_ranks = group.rank(), group.size()
    held = [cases.tokens_of(shape, source, 0) for source in range(num_ranks)]
    with make(group, shape) as buffer:
        num_local = len(
            reference.dispatch([t.x for t in held], [t.ids for t in held], 10)[rank].rows
        )
        for _ in range(3):
            recv_wide, recv_stats = fenced(num_local, torch.int32)
            wait_wide, wait_stats = fenced(num_ranks, torch.int64)
            between = guards.place(buffer, received_bytes(shape, num_local, num_ranks))
            group.barrier()
            result = cases.send(
                buffer,
                shape,
                held[rank],
                cumulative_local_expert_recv_stats=recv_stats,
                dispatch_wait_recv_cost_stats=wait_stats,
            )
            expected = cases.check_received(shape, rank, held, result)
            received = result[0]
            guards.check(between, received)
            check_fence(recv_wide, "cumulative_local_expert_recv_stats")
            check_fence(wait_wide, "dispatch_wait_recv_cost_stats")
            assert recv_stats.tolist() == result[1].tolist()
            _check_unused_rows(received, result[1])

            outputs = cases.expert_outputs(shape, expected)
            x = cases.place_rows(buffer, shape, outputs[rank], result)
            count = len(held[rank].x) * shape.hidden
            out_wide, out = fenced(count, torch.bfloat16)
            cost_wide, cost = fenced(num_ranks, torch.int64)
            combined, _, _ = buffer.low_latency_combine(
                x,
                held[rank].ids,
                held[rank].weights,
                result[2],
                out=out.view(-1, shape.hidden),
                combine_wait_recv_cost_stats=cost,
            )
            assert combined.data_ptr() == out.data_ptr()
            wanted = reference.combine(outputs, expected, [t.weights for t in held], shape.hidden)
            assert torch.equal(combined, wanted[rank])
            check_fence(out_wide, "out")
            check_fence(cost_wide, "combine_wait_recv_cost_stats")
            group.barrier()


def _check_unused_rows(received: Any, counts: torch.Tensor) -> None:
    """Rows that nobody sent hold what was there before: the filling of guards.place."""
    data, scales = received if isinstance(received, tuple) else (received, None)
    for e, count in enumerate(counts.tolist()):
        rest = cases.bits(data[e, count:])
        assert bool((rest == guards.GUARD).all()), f"expert {e}: a row past the {count} received"
        if scales is not None:
            rest = cases.bits(scales[e, count:])
            assert bool((rest == guards.GUARD).all()), f"expert {e}: scales past the {count} rows"


@pytest.mark.parametrize("cast", ["bf16", "fp8", "ue8m0"])
def test_nothing_is_written_beside_the_results(cast: str) -> None:
    """Receive tensors, statistics, `out`, and the rows of an expert that nobody sent."""
    run_ranks(RANKS, _guarded, BASE.but(cast=cast, rows="exported"))


# ---- What a hook keeps


def _only_the_hook_is_left(group: ThreadGroup) -> None:
    shape = BASE.but(hook=True)
    mine = cases.tokens_of(shape, group.rank(), 0)
    with make(group, shape) as buffer:
        for _ in range(3):
            result: Any = cases.send(buffer, shape, mine)
            hook, handle = result[4], result[2]
            refs = [weakref.ref(tensor) for tensor in (*result[0], result[1])]
            del result
            gc.collect()
            assert all(ref() is not None for ref in refs), "what the hook writes to is gone"
            hook()
            x = torch.zeros(len(handle.recv_source), group.size() * shape.max_tokens, shape.hidden)
            sent = buffer.low_latency_combine(
                x.bfloat16(), mine.ids, mine.weights, handle, return_recv_hook=True
            )
            ref, finish = weakref.ref(sent[0]), cast(Any, sent[2])
            del sent, x, handle
            gc.collect()
            combined = ref()
            assert combined is not None, "what the hook writes to is gone"
            finish()
            assert not combined.any()
            # Without the garbage collector, which may come late. The results are large.
            assert all(ref() is None for ref in refs), "a hook that was called keeps its tensors"
            del hook, finish, combined
            group.barrier()


def test_a_hook_keeps_what_it_writes_to_and_no_longer() -> None:
    run_ranks(RANKS, _only_the_hook_is_left)


# ---- Numbers that are none

STRANGE = (float("nan"), float("inf"), float("-inf"))


def _strange_numbers(group: ThreadGroup, use_fp8: bool) -> None:
    shape = Shape(tokens=6, max_tokens=6, hidden=512, topk=2, experts=6)
    held = [cases.tokens_of(shape, source, 0) for source in range(group.size())]
    for tokens in held:
        for token, value in enumerate(STRANGE):
            tokens.x[token, 130 + token] = value  # in the second group of 128
    mine = held[group.rank()]
    with make(group, shape) as buffer:
        payload, count, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.ids, shape.max_tokens, shape.experts, use_fp8=use_fp8
        )
        data, scales = payload if isinstance(payload, tuple) else (payload, None)
        cast = [cases.cast_of(t.x, "fp8" if use_fp8 else "bf16") for t in held]
        ids = [t.ids for t in held]
        wanted = reference.dispatch([rows for rows, _ in cast], ids, shape.experts)[group.rank()]
        others = [i for i in range(shape.hidden) if not (use_fp8 and 128 <= i < 256)]
        for e, rows in enumerate(wanted.rows):
            got = cases.bits(data[e, : len(rows)]).view(len(rows), shape.hidden, -1)
            want = cases.bits(rows).view(len(rows), shape.hidden, -1)
            assert torch.equal(got[:, others], want[:, others]), f"rows of expert {e}"
        if scales is not None:
            groups = [0, 2, 3]
            sent = [scale for _, scale in cast if scale is not None]
            for e, rows in enumerate(
                reference.dispatch(sent, ids, shape.experts)[group.rank()].rows
            ):
                assert torch.equal(scales[e, : len(rows), groups], rows[:, groups])
        # Experts that return their rows: what is strange stays in its token and its column.
        y = torch.zeros(data.shape).bfloat16()
        for e, rows in enumerate(wanted.rows):
            y[e, : len(rows)] = data[e, : len(rows)].float().bfloat16()
        out, _, _ = buffer.low_latency_combine(y, mine.ids, mine.weights, handle)
        assert bool(torch.isfinite(out[:, others][len(STRANGE) :]).all())
        assert bool(torch.isfinite(out[len(STRANGE) :]).all()), "it spread to other tokens"
        if not use_fp8:
            for token in range(len(STRANGE)):
                strange = ~torch.isfinite(out[token])
                assert strange.nonzero().flatten().tolist() == [130 + token]
        assert count.sum() > 0


@pytest.mark.parametrize("use_fp8", [False, True])
def test_nan_and_infinity_stay_where_they_are(use_fp8: bool) -> None:
    """BF16 rows travel bit for bit. A cast to FP8 is defined for finite numbers only; what it makes
    of others stays in their group of 128."""
    run_ranks(RANKS, _strange_numbers, use_fp8)


# ---- Processes


def _all_modes(group: Any) -> None:
    for number, shape in enumerate(MODES):
        with make(group, shape) as buffer:
            for seed in (number, number + 1):
                check_round(buffer, shape, seed)


def test_every_mode_among_processes() -> None:
    run_processes(4, _all_modes, timeout=240)
