"""Runs a Case on a Buffer and compares every result with deepep.reference, bit for bit.

Everything expected is computed once, before the ranks start, and shared by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from deepep import reference
from deepep.buffer import Buffer, Dispatched, Layout

from tests.distributed.cases import DEVICE, Case, Inputs, Tensors, inputs, summands


@dataclass(frozen=True)
class Expected:
    """A case with its tensors and all its right answers; lists are by rank.

    Attributes:
        outputs: what each rank's experts make of its received rows [n, hidden].
        weights: what each rank passes to combine as topk_weights [n, top-k].
    """

    case: Case
    inputs: list[Inputs]
    dispatched: list[reference.Dispatched]
    outputs: list[torch.Tensor]
    weights: list[torch.Tensor]
    combined: list[reference.Combined]
    ranks_per_node: int | None = None

    def received(self, rank: int) -> int:
        return int(self.dispatched[rank].recv_src_idx.shape[0])

    def rows(self, rank: int) -> int:
        """Rows of the tensors that dispatch returns on this rank."""
        if self.case.worst is None:
            return self.received(rank)
        return max(1, self.received(rank) + self.case.worst)


@lru_cache(maxsize=32)
def expect(case: Case, ranks_per_node: int | None = None) -> Expected:
    """The right answers; many tests share a case, and finding them takes longer than the test."""
    made = inputs(case)
    dispatched = reference.dispatch_reference(
        [item.x for item in made],
        [item.topk_idx for item in made],
        [item.topk_weights for item in made] if case.with_topk else None,
        case.num_experts,
    )
    outputs, weights = [], []
    for rank, result in enumerate(dispatched):
        g = torch.Generator().manual_seed(1000 * case.seed + 500 + rank)
        n = int(result.recv_src_idx.shape[0])
        outputs.append(summands((n, case.hidden), g))
        weights.append(torch.randn((n, case.num_topk), generator=g))
    combined = reference.combine_reference(
        outputs, dispatched, weights, [item.biases for item in made], ranks_per_node
    )
    return Expected(case, made, dispatched, outputs, weights, combined, ranks_per_node)


# ---- Comparing


def same_bits(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Type, shape and every bit; NaNs too."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{what}: {got.dtype} {got.shape}"
    assert got.device.type == DEVICE.type, f"{what} is on {got.device}"
    assert got.is_contiguous(), f"{what} has strides {got.stride()}"
    if got.numel() == 0:
        return
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    mine, right = got.cpu(), want.contiguous()
    if got.dtype is not torch.bool:
        mine, right = mine.view(words), right.view(words)
    wrong = (mine != right).nonzero()
    assert len(wrong) == 0, (
        f"{what}: {len(wrong)} of {got.numel()} elements differ, first at {wrong[0].tolist()}: "
        f"{got[tuple(wrong[0])]} instead of {want[tuple(wrong[0])]}"
    )


def first(tensors: Tensors, rows: int) -> Tensors:
    if isinstance(tensors, tuple):
        return tensors[0][:rows], tensors[1][:rows]
    return tensors[:rows]


def same_payload(what: str, got: Tensors, want: Tensors) -> None:
    assert isinstance(got, tuple) == isinstance(want, tuple), f"{what}: {type(got)}"
    if isinstance(got, tuple) and isinstance(want, tuple):
        same_bits(f"{what}[0]", got[0], want[0])
        same_bits(f"{what}[1] (scales)", got[1], want[1])
    elif isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        same_bits(what, got, want)


def check_layout(layout: Layout, want: reference.Layout, ranks_per_node: int | None = None) -> None:
    if ranks_per_node is None:
        assert layout[1] is None, "there are no network ranks"
    else:
        per_node = want.is_token_in_rank.unflatten(1, (-1, ranks_per_node)).any(2).sum(0)
        assert layout[1] is not None
        same_bits("num_tokens_per_rdma_rank", layout[1], per_node.to(torch.int32))
    same_bits("num_tokens_per_rank", layout[0], want.num_tokens_per_rank)
    same_bits("num_tokens_per_expert", layout[2], want.num_tokens_per_expert)
    same_bits("is_token_in_rank", layout[3], want.is_token_in_rank)


def check_handle(handle: Any, expected: Expected, rank: int) -> None:
    want, case = expected.dispatched[rank], expected.case
    n = expected.received(rank)
    same_bits(
        "num_recv_tokens_per_expert",
        handle.num_recv_tokens_per_expert,
        want.num_recv_tokens_per_expert,
    )
    assert handle.num_recv_tokens == (n if case.worst is None else None)
    assert handle.recv_capacity == expected.rows(rank)
    same_bits("recv_src_idx", handle.recv_src_idx[:n], want.recv_src_idx)
    if expected.ranks_per_node is not None:
        check_internode_handle(handle, expected, rank, expected.ranks_per_node)
        return
    same_bits("rank_prefix_matrix", handle[0], want.rank_prefix_matrix)
    same_bits("channel_prefix_matrix", handle[1], want.layout.num_tokens_per_rank.view(-1, 1))
    same_bits("recv_channel_prefix", handle[2], torch.zeros((case.num_ranks, 1), dtype=torch.int32))
    assert handle[3].shape == (expected.rows(rank),)
    same_bits("is_token_in_rank", handle[4], want.layout.is_token_in_rank)
    same_bits("send_head", handle[5], want.send_head)


def check_internode_handle(handle: Any, expected: Expected, rank: int, size: int) -> None:
    """The ten tensors of V1's internode handle, as InternodeHandle documents them."""
    want, num_ranks = expected.dispatched[rank], expected.case.num_ranks
    node, local = divmod(rank, size)
    in_node = want.layout.is_token_in_rank.unflatten(1, (-1, size)).any(2)
    same_bits("is_token_in_rank", handle[0], want.layout.is_token_in_rank)
    same_bits("rdma_channel_prefix_matrix", handle[1][:, 0], in_node.sum(0).to(torch.int32))
    same_bits("gbl_channel_prefix_matrix", handle[2][:, 0], want.layout.num_tokens_per_rank)
    zeros = torch.zeros((num_ranks, 1), dtype=torch.int32)
    same_bits("recv_rdma_channel_prefix_matrix", handle[3], zeros[: num_ranks // size])
    same_bits("recv_gbl_channel_prefix_matrix", handle[5], zeros)
    column = want.rank_prefix_matrix[:, rank].contiguous()
    same_bits("recv_gbl_rank_prefix_sum", handle[6], column)
    numbers = (in_node.cumsum(0) - 1).masked_fill(~in_node, -1)
    numbers[:, node] = -1
    same_bits("send_rdma_head", handle[8], numbers.to(torch.int32))
    # What this rank puts in place for the others of its rail, in the order of nodes and tokens.
    rows, tokens, counts = [], [], []
    for other in range(num_ranks // size):
        heads = expected.dispatched[other * size + local].send_head[:, node * size :][:, :size]
        sent = (heads >= 0).any(1) if other != node else torch.zeros(len(heads), dtype=torch.bool)
        rows.append(heads[sent])
        tokens.append(sent.nonzero()[:, 0].to(torch.int32))
        counts.append(int(sent.sum()))
    forwarded = sum(counts)
    prefix = torch.tensor(counts).cumsum(0).to(torch.int32)
    same_bits("recv_rdma_rank_prefix_sum", handle[4], prefix)
    same_bits("send_nvl_head", handle[9][:forwarded], torch.cat(rows))
    same_bits("forward_token", handle.forward_token[:forwarded], torch.cat(tokens))


def check_dispatched(result: Dispatched, expected: Expected, rank: int) -> None:
    """Everything that a dispatch without a handle returns."""
    want, case, n = expected.dispatched[rank], expected.case, expected.received(rank)
    x, ids, weights, per_expert, handle, event = result
    assert event.event is None
    rows = x[0] if isinstance(x, tuple) else x
    assert rows.shape[0] == expected.rows(rank), f"{rows.shape[0]} rows"
    same_payload("recv_x", first(x, n), want.recv_x)
    if want.recv_topk_idx is None or want.recv_topk_weights is None:
        assert ids is None and weights is None
    else:
        assert ids is not None and weights is not None
        same_bits("recv_topk_idx", ids[:n], want.recv_topk_idx)
        same_bits("recv_topk_weights", weights[:n], want.recv_topk_weights)
        assert ids.shape == weights.shape == (expected.rows(rank), case.num_topk)
        assert bool((ids[n:] == -1).all()), "ids of rows that were not received"
    if case.worst is None:
        assert per_expert == want.aligned_counts(case.alignment)
    else:
        assert per_expert == []
    check_handle(handle, expected, rank)


# ---- Calling


def on_device(tensors: Tensors) -> Tensors:
    if isinstance(tensors, tuple):
        return tensors[0].to(DEVICE), tensors[1].to(DEVICE)
    return tensors.to(DEVICE)


def payload(buffer: Buffer, expected: Expected) -> Tensors:
    """What this rank sends."""
    return on_device(expected.inputs[buffer.rank].x)


def layout(buffer: Buffer, expected: Expected) -> Layout:
    mine = expected.inputs[buffer.rank]
    return buffer.get_dispatch_layout(mine.topk_idx.to(DEVICE), expected.case.num_experts)


def dispatch(buffer: Buffer, expected: Expected, **others: Any) -> Dispatched:
    """A dispatch without a handle, as the case says; `others` replace arguments."""
    case, mine = expected.case, expected.inputs[buffer.rank]
    per_rank, per_node, per_expert, in_rank, _ = layout(buffer, expected)
    arguments: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "expert_alignment": case.alignment,
    }
    if case.with_topk:
        arguments["topk_idx"] = mine.topk_idx.to(DEVICE)
        arguments["topk_weights"] = mine.topk_weights.to(DEVICE)
    if case.worst is not None:
        arguments["num_worst_tokens"] = expected.rows(buffer.rank)
    arguments.update(others)
    return buffer.dispatch(arguments.pop("x", payload(buffer, expected)), **arguments)


def output_of(buffer: Buffer, expected: Expected, exported: bool) -> torch.Tensor:
    """What this rank's experts made, where peers can reach it or not; spare rows are NaN."""
    rows = expected.outputs[buffer.rank]
    shape = (expected.rows(buffer.rank), expected.case.hidden)
    made = buffer.empty(*shape) if exported else torch.empty(shape, dtype=rows.dtype, device=DEVICE)
    made.fill_(float("nan"))
    made[: len(rows)] = rows.to(DEVICE)
    return made


def combine(buffer: Buffer, expected: Expected, handle: Any, exported: bool = False) -> None:
    """Combines the outputs, with the weights and biases of the case, and checks the sums."""
    rank = buffer.rank
    n, want = expected.received(rank), expected.combined[rank]
    weights = torch.full((expected.rows(rank), expected.case.num_topk), float("nan"))
    weights[:n] = expected.weights[rank]
    biases: Any = tuple(bias.to(DEVICE) for bias in expected.inputs[rank].biases)
    got, got_weights, event = buffer.combine(
        output_of(buffer, expected, exported),
        handle,
        topk_weights=weights.to(DEVICE),
        bias=biases[0] if len(biases) == 1 else biases or None,
    )
    assert event.event is None
    same_bits("combined_x", got, want.combined_x)
    assert got_weights is not None and want.combined_topk_weights is not None
    same_bits("combined_topk_weights", got_weights, want.combined_topk_weights)


def round_trip(buffer: Buffer, expected: Expected) -> Any:
    """Layout, dispatch, combine: all results checked. Returns the handle."""
    rank = buffer.rank
    want = expected.dispatched[rank].layout
    check_layout(layout(buffer, expected), want, expected.ranks_per_node)
    result = dispatch(buffer, expected)
    check_dispatched(result, expected, rank)
    combine(buffer, expected, result[4], exported=expected.case.seed % 2 == 0)
    return result[4]
