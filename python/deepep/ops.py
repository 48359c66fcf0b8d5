"""Dispatch and combine as operators of torch.library, for torch.compile, export and checkpointing.

    name = ops.register(buffer)  # once, outside of compiled code

    received = ops.dispatch(name, x, topk_idx, topk_weights, num_experts)
    y = experts(received.x, received.topk_idx, received.topk_weights)
    out = ops.combine(name, y, received.routing)

The same functions as deepep.autograd, but everything that crosses them is a tensor, a number or a
name, so a compiler sees one opaque operator with known shapes. The number of received rows depends
on data: under torch.compile it is an unbacked symbol, and with `num_worst_tokens` a fixed size.

Backward communicates and is collective, as forward is. A compiled graph keeps the order of these
operators only as far as one needs another's result, so all ranks must run the same program.
Needs torch 2.4. Letters in docstrings as in deepep.buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepep import operators
from deepep.operators import Routing, register

__all__ = ["Received", "Routing", "combine", "dispatch", "register"]


class Received(NamedTuple):
    """What a rank holds after a dispatch.

    Attributes:
        x: bfloat16 [n, H]; rows by source rank, then by token. Differentiable.
        topk_idx: int64 or int32 [n, K]; ids of this rank's experts, or -1.
        topk_weights: float32 [n, K]; 0 where the id is -1. Differentiable.
        num_tokens_per_expert: int32 [El]; received selections, on the Buffer's device.
        routing: for combine.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    routing: Routing


def dispatch(
    buffer: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    num_worst_tokens: int = 0,
) -> Received:
    """deepep.autograd.dispatch as an operator.

    Args:
        buffer: what register() returned.
        x, topk_idx, topk_weights, num_experts: as there.
        num_worst_tokens: if positive, results have exactly this many rows, and the host waits for
            no count. Rows beyond the received ones are undefined; their ids are -1.

    Raises:
        KeyError: no such Buffer.
        as Buffer.dispatch, in backward as well.
    """
    recv_x, recv_idx, recv_weights, per_expert, *routing = operators.dispatch(
        x, topk_idx, topk_weights, buffer, num_experts, num_worst_tokens
    )
    return Received(recv_x, recv_idx, recv_weights, per_expert, Routing(*routing))


def combine(buffer: str, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """deepep.autograd.combine as an operator: bfloat16 [n, H] to [T, H].

    Raises:
        KeyError: no such Buffer.
        as Buffer.combine, in backward as well.
    """
    combined: torch.Tensor = operators.combine(x, *routing, buffer)
    return combined
