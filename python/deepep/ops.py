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

For decoding there are low_latency_dispatch and low_latency_combine, all of whose sizes are fixed.
They are for inference: they have no gradient. On a GPU the dispatch copies its small results once
more than the Buffer's method does, since results of an operator must not share memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepep import low_latency_operators, operators
from deepep.low_latency_operators import LowLatencyRouting
from deepep.operator_routing import Routing
from deepep.operators import register

__all__ = [
    "LowLatencyReceived",
    "LowLatencyRouting",
    "Received",
    "Routing",
    "combine",
    "dispatch",
    "low_latency_combine",
    "low_latency_dispatch",
    "register",
]


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


class LowLatencyReceived(NamedTuple):
    """What a rank holds after a low-latency dispatch.

    Attributes:
        x: bfloat16 or float8_e4m3fn [El, R * M, H]; so many first rows of an expert as
            num_rows_per_expert says are valid, by source rank, then by token.
        scales: float32 or int32 [El, R * M, ns]; ns is 0 for BF16 rows.
        num_rows_per_expert: int32 [El].
        routing: for low_latency_combine.
    """

    x: torch.Tensor
    scales: torch.Tensor
    num_rows_per_expert: torch.Tensor
    routing: LowLatencyRouting


def low_latency_dispatch(
    buffer: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    *,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> LowLatencyReceived:
    """Buffer.low_latency_dispatch of BF16 rows as an operator; without hook, for inference.

    Args:
        buffer: what register() returned for a Buffer made with low_latency_mode=True.
        the others: as there.

    Raises:
        KeyError: no such Buffer.
        as Buffer.low_latency_dispatch.
    """
    rows, scales, count, source, layout, index = low_latency_operators.dispatch(
        x,
        topk_idx,
        buffer,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        use_fp8,
        round_scale,
        use_ue8m0,
    )
    routing = LowLatencyRouting(
        source, layout, index, num_max_dispatch_tokens_per_rank, num_experts
    )
    return LowLatencyReceived(rows, scales, count, routing)


def low_latency_combine(
    buffer: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: LowLatencyRouting,
    *,
    use_logfmt: bool = False,
) -> torch.Tensor:
    """Buffer.low_latency_combine as an operator: bfloat16 [El, R * M, H] to [T, H].

    Raises:
        KeyError: no such Buffer.
        as Buffer.low_latency_combine.
    """
    recv_source, layout_range, send_index, max_tokens, num_experts = routing
    combined: torch.Tensor = low_latency_operators.combine(
        x,
        topk_idx,
        topk_weights,
        recv_source,
        layout_range,
        send_index,
        buffer,
        max_tokens,
        num_experts,
        use_logfmt,
    )
    return combined
