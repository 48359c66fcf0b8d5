"""What is behind the low-latency methods of Buffer: checked tensors in, launches, tensors out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepep import _runtime, arguments, fp8, topology
from deepep.arguments import Payload, Rows
from deepep.blocks import Memory
from deepep.engine import Engine
from deepep.handles import LowLatencyHandle
from deepep.routing import pointer
from deepep.workspace import Workspace, check_shape, check_size

SEND, RECEIVE = 1, 2
"""DeepEpLowLatencyPhases of the ABI."""

CAST_NONE, CAST_FP8, CAST_FP8_ROUNDED, CAST_FP8_UE8M0 = range(4)
"""DeepEpCast of the ABI."""

ALL_BLOCKS = 1 << 30
"""Thread blocks that a low-latency operation may use: as many as can run together."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The checked arguments of a dispatch."""

    rows: Rows
    cast: int
    num_scales: int
    scale_dtype: torch.dtype
    ids: torch.Tensor
    max_tokens: int
    num_experts: int
    num_local: int
    recv_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the launched kernels read, or add to."""
        return (self.rows.x, self.rows.scales, self.ids, self.recv_stats, self.wait_stats)


def check_stats(
    name: str, stats: object | None, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """An optional tensor that counts are added to, contiguous."""
    if stats is None:
        return None
    tensor = arguments.check_tensor(name, stats, (size,), (dtype,), device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}, but must be contiguous.")
    return tensor


def _check_cast(
    x: object, use_fp8: bool, round_scale: bool, use_ue8m0: bool, engine: Engine
) -> tuple[Rows, int, int, torch.dtype]:
    """The rows, what becomes of them, and the scales of a received row."""
    if use_ue8m0 and not round_scale:
        raise ValueError(
            "use_ue8m0=True with round_scale=False: UE8M0 holds powers of two only; pass "
            "round_scale=True as well."
        )
    rows = arguments.check_payload(x, engine.device)
    if rows.scales is not None:
        if not use_fp8 or round_scale:
            raise ValueError(
                f"x is (data, scales) with use_fp8={use_fp8}, round_scale={round_scale}: it is "
                "sent as it is. Pass use_fp8=True and round_scale=False, or BF16 rows."
            )
        return rows, CAST_NONE, rows.num_scales, rows.scales.dtype
    if not use_fp8:
        if round_scale:
            raise ValueError("round_scale=True with use_fp8=False: BF16 rows have no scales.")
        return rows, CAST_NONE, 0, torch.float32
    if rows.hidden % topology.ROW_ALIGNMENT_BYTES:
        raise ValueError(
            f"x has hidden size {rows.hidden}, but FP8 rows must be a multiple of "
            f"{topology.ROW_ALIGNMENT_BYTES} bytes; pad hidden to "
            f"{-(-rows.hidden // topology.ROW_ALIGNMENT_BYTES) * topology.ROW_ALIGNMENT_BYTES}, or "
            "pass use_fp8=False."
        )
    rows = rows._replace(dtype_name="fp8")
    if use_ue8m0:
        layout = fp8.scale_layout(0, rows.hidden, "ue8m0")
        return rows, CAST_FP8_UE8M0, layout.shape[1], torch.int32
    cast = CAST_FP8_ROUNDED if round_scale else CAST_FP8
    return rows, cast, fp8.num_scale_groups(rows.hidden), torch.float32


def check_dispatch(
    engine: Engine,
    x: object,
    topk_idx: object,
    max_tokens: int,
    num_experts: int,
    recv_stats: object | None,
    wait_stats: object | None,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> Sent:
    """Checks everything that a dispatch is given."""
    device, num_ranks = engine.device, engine.num_ranks
    rows, cast, num_scales, scale_dtype = _check_cast(x, use_fp8, round_scale, use_ue8m0, engine)
    check_shape(max_tokens, rows.hidden, num_ranks, num_experts)
    if rows.num_tokens > max_tokens:
        raise ValueError(
            f"x has {rows.num_tokens} tokens, but num_max_dispatch_tokens_per_rank is "
            f"{max_tokens}; pass at least the tokens of the rank that has most, the same number "
            "on all ranks."
        )
    ids = arguments.check_topk(topk_idx, None, rows.num_tokens, device).ids
    num_local = topology.num_local_experts(num_experts, num_ranks, engine.rank)
    return Sent(
        rows,
        cast,
        num_scales,
        scale_dtype,
        ids,
        max_tokens,
        num_experts,
        num_local,
        check_stats(
            "cumulative_local_expert_recv_stats", recv_stats, num_local, torch.int32, device
        ),
        check_stats("dispatch_wait_recv_cost_stats", wait_stats, num_ranks, torch.int64, device),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """What the phases of a dispatch are launched with, and the memory that they write to."""

    call: _runtime.LowLatencyDispatchArgs
    library: _runtime.Library
    recv_bytes: int
    memory: tuple[Memory, Memory]


@dataclass(frozen=True, slots=True)
class Received:
    """A dispatch that was launched, or half of it, and its results."""

    launch: Launch
    x: Payload
    count: torch.Tensor
    handle: LowLatencyHandle
    send_counts: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the launched kernels write."""
        made = (self.count, self.send_counts, self.handle.recv_source, self.handle[1])
        return (*arguments.tensors_of(self.x), *made, self.handle.send_index)


def dispatch(
    engine: Engine, workspace: Workspace, buffer_id: int, sent: Sent, hook: bool
) -> Received:
    """Launches all of a dispatch, or, with `hook`, its first half; then makes the tensors."""
    rows, num_ranks, num_local = sent.rows, engine.num_ranks, sent.num_local
    direct = not hook and workspace.mask is None and workspace.reaches_peers
    if not direct:
        check_size(workspace, sent.max_tokens, rows.hidden, num_ranks, sent.num_experts)
    num_rows = num_ranks * sent.max_tokens
    num_tokens, num_topk = sent.ids.shape
    x_dtype = torch.float8_e4m3fn if sent.cast != CAST_NONE else rows.x.dtype
    make = engine.one_piece if direct else engine.local_piece
    received = make(
        ((num_local, num_rows, rows.hidden), x_dtype),
        ((num_local, sent.num_scales, num_rows), sent.scale_dtype),
        ((num_local, num_rows), torch.int64),
    )
    own = engine.local_piece(
        ((num_local, num_ranks), torch.int64),
        ((num_tokens, num_topk), torch.int32),
        ((sent.num_experts,), torch.int32),
        ((num_local,), torch.int32),
    )
    at_x, at_scales, at_source = received.addresses
    at_range, at_index, at_send_counts, at_count = own.addresses
    call = _runtime.LowLatencyDispatchArgs(
        num_blocks=engine.num_blocks(None, ALL_BLOCKS),
        stream=engine.stream,
        phases=SEND if hook else SEND | RECEIVE,
        direct=int(direct),
        cast=sent.cast,
        num_tokens=rows.num_tokens,
        max_tokens=sent.max_tokens,
        hidden=rows.hidden,
        num_scales=sent.num_scales,
        num_topk=num_topk,
        num_experts=sent.num_experts,
        idx_bytes=sent.ids.element_size(),
        x=pointer(rows.x),
        x_scales=pointer(rows.scales),
        scale_token_stride=rows.scales.stride(0) if rows.scales is not None else 0,
        scale_group_stride=rows.scales.stride(1) if rows.scales is not None else 0,
        topk_idx=pointer(sent.ids),
        mask=pointer(workspace.mask),
        send_index=at_index,
        send_counts=at_send_counts,
        recv_x=at_x,
        recv_scales=at_scales,
        recv_source=at_source,
        recv_count=at_count,
        layout_range=at_range,
        recv_stats=pointer(sent.recv_stats),
        wait_stats=pointer(sent.wait_stats),
    )
    recv_bytes = 0
    if direct and num_local * num_rows > 0:
        recv_bytes = at_source + num_local * num_rows * 8 - at_x
    library = engine.library(rows.hidden, rows.dtype_name, "lowlatency")
    launch = Launch(call, library, recv_bytes, (received, own))
    launch_dispatch(engine, launch)

    x, scales, source = received.tensors()
    layout_range, send_index, send_counts, count = own.tensors()
    handle = LowLatencyHandle(
        recv_source=source,
        layout_range=layout_range,
        max_tokens=sent.max_tokens,
        hidden=rows.hidden,
        num_experts=sent.num_experts,
        send_index=send_index,
        buffer_id=buffer_id,
    )
    payload: Payload = (x, scales.transpose(1, 2)) if sent.num_scales else x
    return Received(launch, payload, count, handle, send_counts)


def launch_dispatch(engine: Engine, launch: Launch) -> None:
    """Launches the phases that the call names."""
    size = launch.recv_bytes
    engine.run(
        launch.library,
        lambda lib: lambda domain, call: lib.low_latency_dispatch(domain, call, size),
        launch.call,
        keep=launch.memory,
    )


@dataclass(frozen=True, slots=True)
class Combined:
    """A combine that was launched, or half of it, and its result."""

    call: _runtime.LowLatencyCombineArgs
    library: _runtime.Library
    x_bytes: int
    out: torch.Tensor
    used: tuple[torch.Tensor | None, ...]


def check_combine(
    engine: Engine,
    handle: LowLatencyHandle,
    x: object,
    topk_idx: object,
    topk_weights: object,
    out: object | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The expert rows, ids, weights and the place of the result, checked against the handle."""
    device = engine.device
    _, _, max_tokens, hidden, num_experts = handle
    num_local = topology.num_local_experts(num_experts, engine.num_ranks, engine.rank)
    shape = (num_local, engine.num_ranks * max_tokens, hidden)
    rows = arguments.check_tensor("x", x, shape, (torch.bfloat16,), device)
    if not rows.is_contiguous():
        raise ValueError(
            f"x is {arguments.shape_of(rows)} with strides {list(rows.stride())}, but must be "
            "contiguous; pass x.contiguous()."
        )
    topk = arguments.check_topk(topk_idx, topk_weights, handle.num_tokens, device)
    if topk.num_topk != handle.num_topk or topk.weights is None:
        raise ValueError(
            f"topk_idx is {arguments.shape_of(topk.ids)}, but the dispatch had "
            f"{handle.num_topk} selections a token; pass the same topk_idx, with weights."
        )
    if out is not None:
        wanted = (handle.num_tokens, hidden)
        out = arguments.check_tensor("out", out, wanted, (torch.bfloat16,), device)
        if not out.is_contiguous():
            raise ValueError(f"out has strides {list(out.stride())}, but must be contiguous.")
    return rows, topk.ids, topk.weights, out


def combine(
    engine: Engine,
    workspace: Workspace,
    handle: LowLatencyHandle,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None,
    wait_stats: torch.Tensor | None,
    use_logfmt: bool,
    owned: bool,
    hook: bool,
) -> Combined:
    """Launches all of a combine, or, with `hook`, its first half.

    Rows that peers can reach are read where they lie, unless the caller may overwrite them before
    the second half: `owned` says that it does not.
    """
    _, layout_range, max_tokens, hidden, num_experts = handle
    if out is None:
        (out,) = engine.local(((handle.num_tokens, hidden), torch.bfloat16))
    pulled = (
        not use_logfmt
        and x.numel() > 0
        and workspace.reaches_peers
        and (owned or not hook)
        and engine.is_exported(x)
    )
    if not pulled:
        check_size(workspace, max_tokens, hidden, engine.num_ranks, num_experts)
    call = _runtime.LowLatencyCombineArgs(
        num_blocks=engine.num_blocks(None, ALL_BLOCKS),
        stream=engine.stream,
        phases=SEND if hook else SEND | RECEIVE,
        use_logfmt=int(use_logfmt),
        num_tokens=handle.num_tokens,
        max_tokens=max_tokens,
        hidden=hidden,
        num_topk=handle.num_topk,
        num_experts=num_experts,
        idx_bytes=ids.element_size(),
        x=pointer(x),
        topk_idx=pointer(ids),
        topk_weights=pointer(weights),
        send_index=pointer(handle.send_index),
        recv_source=pointer(handle.recv_source),
        layout_range=pointer(layout_range),
        mask=pointer(workspace.mask),
        out=pointer(out),
        wait_stats=pointer(wait_stats),
    )
    used = (x, ids, weights, out, wait_stats, handle.send_index, handle.recv_source, layout_range)
    x_bytes = x.numel() * 2 if pulled else 0
    library = engine.combine_library(hidden, "lowlatency")
    combined = Combined(call, library, x_bytes, out, used)
    launch_combine(engine, combined)
    return combined


def launch_combine(engine: Engine, combined: Combined) -> None:
    """Launches the phases that the call names."""
    size = combined.x_bytes
    engine.run(
        combined.library,
        lambda lib: lambda domain, call: lib.low_latency_combine(domain, call, size),
        combined.call,
        keep=combined.used,
    )
