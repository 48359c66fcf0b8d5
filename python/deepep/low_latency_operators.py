"""The low-latency operators behind deepep.ops: what they do and their shapes, which never depend on
data. They have no gradient.

Users call deepep.ops. As in deepep.operators, a Buffer goes by its name and a handle as tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepep import fp8
from deepep.handles import LowLatencyHandle
from deepep.operators import find, operator, unshared
from deepep.topology import num_local_experts


class LowLatencyRouting(NamedTuple):
    """What low_latency_combine needs of a dispatch.

    Attributes:
        recv_source: int64 [El, R * M].
        layout_range: int64 [El, R].
        send_index: int32 [T, K].
        max_tokens: M.
        num_experts: E.
    """

    recv_source: torch.Tensor
    layout_range: torch.Tensor
    send_index: torch.Tensor
    max_tokens: int
    num_experts: int


# ---- dispatch


def _run_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: str,
    max_tokens: int,
    num_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, ...]:
    received, count, handle, _, _ = find(buffer).low_latency_dispatch(
        x.contiguous(),
        topk_idx,
        max_tokens,
        num_experts,
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=use_ue8m0,
    )
    if isinstance(received, torch.Tensor):
        rows, scales = received, x.new_empty((*received.shape[:2], 0), dtype=torch.float32)
    else:
        rows, scales = received
    return unshared(rows, scales, count, handle.recv_source, handle[1], handle.send_index)


def _dispatch_shapes(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: str,
    max_tokens: int,
    num_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, ...]:
    owner, hidden = find(buffer), x.shape[1]
    local = num_local_experts(num_experts, owner.group_size, owner.rank)
    rows = owner.group_size * max_tokens
    scales = x.new_empty((local, rows, 0), dtype=torch.float32)
    if use_fp8:
        groups = fp8.num_scale_groups(hidden)
        words, dtype = (-(-groups // 4), torch.int32) if use_ue8m0 else (groups, torch.float32)
        scales = x.new_empty((local, words, rows), dtype=dtype).transpose(1, 2)
    return (
        x.new_empty((local, rows, hidden), dtype=torch.float8_e4m3fn if use_fp8 else x.dtype),
        scales,
        x.new_empty((local,), dtype=torch.int32),
        x.new_empty((local, rows), dtype=torch.int64),
        x.new_empty((local, owner.group_size), dtype=torch.int64),
        x.new_empty(topk_idx.shape, dtype=torch.int32),
    )


dispatch = operator(
    "low_latency_dispatch",
    "(Tensor x, Tensor topk_idx, str buffer, SymInt max_tokens, int num_experts, bool use_fp8, "
    "bool round_scale, bool use_ue8m0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_dispatch,
    _dispatch_shapes,
)


# ---- combine


def _run_combine(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    recv_source: torch.Tensor,
    layout_range: torch.Tensor,
    send_index: torch.Tensor,
    buffer: str,
    max_tokens: int,
    num_experts: int,
    use_logfmt: bool,
) -> torch.Tensor:
    owner = find(buffer)
    handle = LowLatencyHandle(
        recv_source=recv_source,
        layout_range=layout_range,
        max_tokens=max_tokens,
        hidden=x.shape[2],
        num_experts=num_experts,
        send_index=send_index,
        buffer_id=owner._id,
    )
    return owner.low_latency_combine(
        x.contiguous(), topk_idx, topk_weights, handle, use_logfmt=use_logfmt
    )[0]


def _combine_shapes(x: torch.Tensor, topk_idx: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((topk_idx.shape[0], x.shape[2]))


combine = operator(
    "low_latency_combine",
    "(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor recv_source, Tensor layout_range, "
    "Tensor send_index, str buffer, SymInt max_tokens, int num_experts, bool use_logfmt) -> Tensor",
    _run_combine,
    _combine_shapes,
)
