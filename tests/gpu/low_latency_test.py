"""Low-latency mode on a GPU: every mode and shape against the definition, order, graphs, masks."""

from __future__ import annotations

import time
import warnings
from typing import Any, cast

import torch
from deepep import Buffer, fp8
from deepep import low_latency_reference as reference

from tests.distributed import low_latency_cases as cases
from tests.distributed import low_latency_numbers as numbers
from tests.distributed.low_latency_cases import MODES, SHAPES, Shape, Tokens, check_round
from tests.gpu.ranks import Rank, on_ranks

BY_NAME = {shape.name: shape for shape in MODES + SHAPES}
STEP = Shape(tokens=16, max_tokens=16, hidden=1024, topk=4, experts=16, rows="exported")


def make(rank: Rank, shapes: list[Shape], **options: Any) -> Buffer:
    size = max(
        Buffer.get_low_latency_rdma_size_hint(s.max_tokens, s.hidden, rank.size, s.experts)
        for s in shapes
    )
    return rank.new_buffer(num_rdma_bytes=size, low_latency_mode=True, **options)


@on_ranks(counts=(1, 2, 4, 8), choices=[shape.name for shape in MODES])
def test_every_mode_equals_the_definition(rank: Rank, name: str) -> None:
    """Bit for bit, so `host`, `sm80` and `sm90` agree as well."""
    with make(rank, [BY_NAME[name]]) as buffer:
        for seed in range(4):
            check_round(buffer, BY_NAME[name], seed)
        rank.barrier()


@on_ranks(counts=(1,), choices=list(numbers.CASTS))
def test_every_finite_number_is_cast_as_on_the_cpu(rank: Rank, name: str) -> None:
    with rank.new_buffer(low_latency_mode=True) as buffer:
        for order in numbers.ORDERS:
            x = numbers.numbers_in(order)
            numbers.check_bits(*numbers.cast_on(buffer, x, name), x, name)


@on_ranks(counts=(2, 8), choices=[shape.name for shape in SHAPES])
def test_any_shape_equals_the_definition(rank: Rank, name: str) -> None:
    with make(rank, [BY_NAME[name]]) as buffer:
        for seed in range(4):
            check_round(buffer, BY_NAME[name], seed)
        rank.barrier()


@on_ranks(counts=(2, 8))
def test_generic_and_specialised_kernels_serve_a_known_model(rank: Rank) -> None:
    shape = STEP.but(hidden=7168, topk=8, experts=64, cast="ue8m0", hook=True, rows="foreign")
    with make(rank, [shape]) as buffer:
        for seed in range(4):
            check_round(buffer, shape, seed)
        chosen = [text.split(":")[0] for text in buffer.chosen_variants()]
        assert f"lowlatency_{rank.arch}_h7168_fp8_r8" in chosen or rank.size != 8
        rank.barrier()


@on_ranks(counts=(2, 4))
def test_modes_and_shapes_follow_each_other_without_a_clean_up(rank: Rank) -> None:
    caps = (1, 2, 4, 8, 44)
    mixed = [
        MODES[i % len(MODES)].but(hidden=(256, 512, 272)[i % 3], max_tokens=cap, tokens=cap)
        for i, cap in enumerate(caps * 8)
    ]
    with make(rank, mixed) as buffer:
        for seed, shape in enumerate(mixed):
            check_round(buffer, shape, seed)
        rank.barrier()


# ---- Many rounds without a synchronisation

Filled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def identity_step(buffer: Buffer, shape: Shape, mine: Filled) -> torch.Tensor:
    """A decode step whose experts return their rows: dispatch, dequantise, combine."""
    x, ids, weights = mine
    (data, scales), _, handle, _, receive = buffer.low_latency_dispatch(
        x, ids, shape.max_tokens, shape.experts, return_recv_hook=shape.hook
    )
    if receive is not None:
        receive()
    y = buffer.empty(*data.shape)
    wide = scales.repeat_interleave(fp8.GROUP_SIZE, dim=2)[..., : shape.hidden]
    y.copy_(data.float() * wide)
    out, _, receive = buffer.low_latency_combine(
        y, ids, weights, handle, return_recv_hook=shape.hook
    )
    if receive is not None:
        receive()
    return out


def identity_sum(mine: Tokens) -> torch.Tensor:
    """What such a step returns."""
    rows = fp8.per_token_cast_back(*fp8.per_token_cast_to_fp8(mine.x)).float()
    total = torch.zeros_like(rows)
    for k in range(mine.ids.shape[1]):
        weight = torch.where(mine.ids[:, k] >= 0, mine.weights[:, k], 0.0)
        total += weight.unsqueeze(1) * rows
    return total.bfloat16()


def filled(mine: Tokens) -> Filled:
    return mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda()


@on_ranks(counts=(2, 8), choices=["direct", "hook"])
def test_rounds_without_a_synchronisation(rank: Rank, way: str) -> None:
    """200 decode steps, each rank dawdling on its own; results are looked at afterwards."""
    shape = STEP.but(hook=way == "hook")
    held = [cases.tokens_of(shape, rank.index, 4 * seed) for seed in range(8)]
    inputs = [filled(mine) for mine in held]
    with make(rank, [shape]) as buffer:
        results = []
        for step in range(200):
            if (step + rank.index) % 7 == 0:
                torch.cuda._sleep(200_000)
            results.append(identity_step(buffer, shape, inputs[step % 8]))
        torch.cuda.synchronize()
        wanted = [identity_sum(mine) for mine in held]
        for step, out in enumerate(results):
            assert torch.equal(out.cpu(), wanted[step % 8]), f"step {step}"
        rank.barrier()


@on_ranks(counts=(2, 4))
def test_two_micro_batches_are_on_their_way_at_once(rank: Rank) -> None:
    """The combine of one batch and the dispatch of the next, experts' work between the halves."""
    shape = STEP.but(hook=True, rows="foreign")
    with make(rank, [shape]) as buffer:
        held = [
            [cases.tokens_of(shape, r, 4 * step) for r in range(rank.size)] for step in range(9)
        ]
        result = cases.send(buffer, shape, held[0][rank.index])
        cast(Any, result[4])()
        for step in range(8):
            expected = cases.check_received(shape, rank.index, held[step], result)
            outputs = cases.expert_outputs(shape, expected)
            x = cases.place_rows(buffer, shape, outputs[rank.index], result)
            _, ids, weights = filled(held[step][rank.index])
            combined, _, finish = buffer.low_latency_combine(
                x, ids, weights, result[2], return_recv_hook=True
            )
            result = cases.send(buffer, shape, held[step + 1][rank.index])
            torch.cuda._sleep(100_000 * (1 + rank.index))
            for receive in (finish, result[4]) if step % 2 else (result[4], finish):
                cast(Any, receive)()
            all_weights = [tokens.weights for tokens in held[step]]
            wanted = reference.combine(outputs, expected, all_weights, shape.hidden)
            assert torch.equal(combined.cpu(), wanted[rank.index])
        rank.barrier()


# ---- Graphs


@on_ranks(counts=(1, 2, 8), choices=["direct", "hook"])
def test_a_captured_decode_step_is_replayed_with_new_tokens(rank: Rank, way: str) -> None:
    """100 replays of dispatch, experts and combine, with other tokens and experts each time."""
    shape = STEP.but(hook=way == "hook")
    held = [cases.tokens_of(shape, rank.index, 4 * seed) for seed in range(10)]
    with make(rank, [shape]) as buffer:
        inputs = filled(held[0])
        for _ in range(3):
            identity_step(buffer, shape, inputs)
        torch.cuda.synchronize()
        rank.barrier()
        graph: Any = cast(Any, torch.cuda).CUDAGraph()
        with torch.cuda.graph(graph):
            out = identity_step(buffer, shape, inputs)
        rank.barrier()
        wanted = [identity_sum(mine) for mine in held]
        for replay in range(100):
            mine = held[replay % 10]
            for place, value in zip(inputs, (mine.x, mine.ids, mine.weights), strict=True):
                place.copy_(value)
            graph.replay()
            if replay % 5 == 0:
                assert torch.equal(out.cpu(), wanted[replay % 10]), f"replay {replay}"
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), wanted[99 % 10])
        rank.barrier()
        del out, graph


# ---- Ranks that are left out


@on_ranks(counts=(4,))
def test_a_dead_rank_is_masked_and_the_others_go_on(rank: Rank) -> None:
    shape = STEP.but(cast="bf16", rows="foreign")
    absent = 1
    mine = cases.tokens_of(shape, rank.index, 0)
    x, ids, weights = filled(mine)
    with make(rank, [shape], enable_shrink=True, timeout=2) as buffer:
        check_round(buffer, shape, 0)
        torch.cuda.synchronize()
        rank.barrier()
        if rank.index != absent:
            for _ in range(3):
                rows, _, handle, _, _ = buffer.low_latency_dispatch(
                    x, ids, shape.max_tokens, shape.experts, use_fp8=False
                )
                out, _, _ = buffer.low_latency_combine(cast(Any, rows), ids, weights, handle)
                torch.cuda.synchronize()
            status = torch.empty(rank.size, dtype=torch.int32, device="cuda")
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(r == absent) for r in range(rank.size)]
            alive = [e for e in range(shape.experts) if e * rank.size // shape.experts != absent]
            total = torch.zeros((len(mine.x), shape.hidden))
            for k in range(shape.topk):
                here = torch.isin(mine.ids[:, k], torch.tensor(alive))
                total += torch.where(here, mine.weights[:, k], 0.0).unsqueeze(1) * mine.x.float()
            assert torch.equal(out.cpu(), total.bfloat16())
        else:
            time.sleep(3)
        rank.barrier()
        buffer.reset()
        buffer.low_latency_clean_mask_buffer()
        rank.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(3):
                check_round(buffer, shape, seed)
        rank.barrier()
