"""Dispatch and combine as differentiable functions.

    received = autograd.dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    y = experts(received.x, received.topk_idx, received.topk_weights)
    out = autograd.combine(buffer, y, received.handle)

Each is the other's gradient: rows that were copied to several ranks get back the sum of these
ranks' gradients (a combine), and rows that were summed each get the gradient of the sum (a dispatch
along the same handle).

So backward communicates, and is collective as forward is: either all ranks run it or none. A rank
that received no row takes part as well; its loss must depend on the result of combine like the
others'. Letters in docstrings as in deepep.buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from deepep.buffer import Buffer
from deepep.events import EventOverlap
from deepep.internode_handle import AnyHandle


class Received(NamedTuple):
    """What a rank holds after a dispatch, and what combine needs to return it.

    Attributes:
        x: bfloat16 [n, H]; rows by source rank, then by token. Differentiable.
        topk_idx: int64 or int32 [n, K]; ids of this rank's experts, or -1.
        topk_weights: float32 [n, K]; 0 where the id is -1. Differentiable.
        num_tokens_per_expert: El counts, rounded up to expert_alignment; empty under
            num_worst_tokens.
        handle: for combine.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: list[int]
    handle: AnyHandle


def dispatch_rows(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_alignment: int,
    num_worst_tokens: int,
    async_finish: bool = False,
) -> tuple[Received, EventOverlap]:
    """Layout and dispatch in one call, as dispatch() but without a gradient; and the event."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x.contiguous(),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        expert_alignment=expert_alignment,
        num_worst_tokens=num_worst_tokens,
        async_finish=async_finish,
    )
    assert isinstance(recv_x, torch.Tensor) and counts is not None  # without a handle: all of them
    assert recv_idx is not None and recv_weights is not None
    return Received(recv_x, recv_idx, recv_weights, counts, handle), event


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: Buffer,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> tuple[Any, ...]:
        received, _ = dispatch_rows(
            buffer, x, topk_idx, topk_weights, num_experts, expert_alignment, num_worst_tokens
        )
        ctx.buffer, ctx.handle = buffer, received.handle
        ctx.save_for_backward(received.topk_idx)
        ctx.mark_non_differentiable(received.topk_idx)
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x: torch.Tensor, _idx: None, grad_weights: torch.Tensor, *_others: None
    ) -> tuple[Any, ...]:
        (recv_idx,) = ctx.saved_tensors
        # A weight of another rank's expert arrived as a constant 0, whatever was computed with it.
        own_weights = grad_weights.masked_fill(recv_idx < 0, 0.0)
        grad, grad_topk, _ = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=own_weights
        )
        return None, grad, None, grad_topk, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, x: torch.Tensor, handle: AnyHandle) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, _ = buffer.combine(x.contiguous(), handle)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0]
        return None, rows, None


def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> Received:
    """Buffer.get_dispatch_layout and Buffer.dispatch, with gradients for rows and weights.

    Args:
        buffer: of the expert-parallel group.
        x: bfloat16 [T, H]. Its gradient is summed over ranks in FP32 and rounded once.
        topk_idx: int64 or int32 [T, K]; -1 for none.
        topk_weights: float32 [T, K]. Its gradient is 0 where the id is -1.
        num_experts: E, of the whole group.
        expert_alignment, num_worst_tokens: as in Buffer.dispatch. Rows beyond the received ones are
            undefined, in their gradients as well: select rows by topk_idx.

    Raises:
        as Buffer.dispatch, in backward as well.
    """
    apply: Any = _Dispatch.apply  # torch gives it no type
    return Received(
        *apply(buffer, x, topk_idx, topk_weights, num_experts, expert_alignment, num_worst_tokens)
    )


def combine(buffer: Buffer, x: torch.Tensor, handle: AnyHandle) -> torch.Tensor:
    """Buffer.combine with a gradient: bfloat16 [n, H] to the sums of each token's rows, [T, H].

    Args:
        buffer: the one that dispatched.
        x: one row for each received row, in their order; weights are already applied.
        handle: Received.handle.

    Raises:
        as Buffer.combine, in backward as well.
    """
    apply: Any = _Combine.apply
    combined: torch.Tensor = apply(buffer, x, handle)
    return combined
