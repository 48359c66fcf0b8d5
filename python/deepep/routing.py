"""What is behind Buffer.dispatch and Buffer.combine: checked tensors in, launches, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepep import _runtime, arguments, receive, topology
from deepep.arguments import Payload, Rows, Topk
from deepep.blocks import Memory, Part
from deepep.engine import Engine
from deepep.errors import CapacityError
from deepep.handles import DispatchHandle
from deepep.internode_handle import AnyHandle

_INT32 = (torch.int32,)
_MAX_ROWS = 2**31 - 1


def pointer(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()  # torch gives 0 for empty tensors


class Plan(NamedTuple):
    """The checked arguments of a dispatch that has no handle yet."""

    per_rank: torch.Tensor
    per_node: torch.Tensor | None
    in_rank: torch.Tensor
    per_expert: torch.Tensor
    topk: Topk | None
    expert_alignment: int
    num_worst_tokens: int

    @property
    def num_experts(self) -> int:
        return int(self.per_expert.shape[0])

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the launched kernels read."""
        topk = (self.topk.ids, self.topk.weights) if self.topk else ()
        return (self.per_rank, self.per_node, self.in_rank, self.per_expert, *topk)


class Received(NamedTuple):
    """The results of a dispatch that made a handle."""

    x: Payload
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    per_expert: list[int]
    handle: AnyHandle

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the launched kernels write."""
        made = (*self.handle, self.handle.num_recv_tokens_per_expert)
        return (*arguments.tensors_of(self.x), self.topk_idx, self.topk_weights, *made)


def check_cached(fresh: Sequence[object | None], num_worst_tokens: int) -> None:
    """With a handle the routing is known; anything else that tells it is a contradiction."""
    names = (
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
    )
    for name, value in zip(names, fresh, strict=True):
        if value is not None:
            raise ValueError(
                f"{name} was given together with handle, which already tells the routing; pass one "
                "of the two."
            )
    if num_worst_tokens:
        raise ValueError(
            f"num_worst_tokens is {num_worst_tokens} together with handle; the handle tells the "
            "number of rows. Pass one of the two."
        )


def check_fresh(
    engine: Engine,
    rows: Rows,
    num_tokens_per_rank: torch.Tensor | None,
    num_tokens_per_rdma_rank: torch.Tensor | None,
    is_token_in_rank: torch.Tensor | None,
    num_tokens_per_expert: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    expert_alignment: int,
    num_worst_tokens: int,
) -> Plan:
    """Checks the arguments that tell the routing."""
    device, num_ranks = engine.device, engine.num_ranks
    num_nodes = engine.nodes.num_nodes
    if num_nodes == 1 and num_tokens_per_rdma_rank is not None:
        raise ValueError("num_tokens_per_rdma_rank was given, but the group has no network ranks.")
    for name, value in (
        *((("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank),) if num_nodes > 1 else ()),
        ("num_tokens_per_rank", num_tokens_per_rank),
        ("is_token_in_rank", is_token_in_rank),
        ("num_tokens_per_expert", num_tokens_per_expert),
    ):
        if value is None:
            raise ValueError(
                f"{name} is missing: without a handle, dispatch needs what get_dispatch_layout "
                "returns."
            )
    per_rank = arguments.check_tensor(
        "num_tokens_per_rank", num_tokens_per_rank, (num_ranks,), _INT32, device
    ).contiguous()
    per_node = None
    if num_nodes > 1:
        per_node = arguments.check_tensor(
            "num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, (num_nodes,), _INT32, device
        ).contiguous()
    in_rank = arguments.check_tensor(
        "is_token_in_rank", is_token_in_rank, (rows.num_tokens, num_ranks), (torch.bool,), device
    ).contiguous()
    per_expert = arguments.check_tensor(
        "num_tokens_per_expert", num_tokens_per_expert, (None,), _INT32, device
    ).contiguous()
    if (topk_idx is None) != (topk_weights is None):
        raise ValueError("topk_idx and topk_weights must be given together, or neither.")
    topk = None
    if topk_idx is not None:
        topk = arguments.check_topk(topk_idx, topk_weights, rows.num_tokens, device)
    if expert_alignment < 1:
        raise ValueError(f"expert_alignment is {expert_alignment}, but must be at least 1.")
    if num_worst_tokens < 0 or (num_worst_tokens > 0 and topk is None):
        raise ValueError(
            f"num_worst_tokens is {num_worst_tokens}; it must be 0, or positive together with "
            "topk_idx and topk_weights, whose -1 rows mark what was not received."
        )
    if num_worst_tokens > _MAX_ROWS:
        raise CapacityError(
            f"num_worst_tokens is {num_worst_tokens}, but rows are numbered in 32 bits: at most "
            f"{_MAX_ROWS}. The sum of all ranks' tokens is always enough."
        )
    return Plan(per_rank, per_node, in_rank, per_expert, topk, expert_alignment, num_worst_tokens)


def dispatch_fresh(
    engine: Engine, buffer_id: int, rows: Rows, plan: Plan, num_blocks: int
) -> Received:
    """Exchanges counts, makes the receive tensors and sends the rows.

    Between the two launches the device is idle, so whatever needs no counts is done before the
    counts are waited for, and whatever the rows do not need is done behind the second launch.
    """
    num_ranks, num_experts = engine.num_ranks, plan.num_experts
    num_local = topology.num_local_experts(num_experts, num_ranks, engine.rank)
    library = engine.library(rows.hidden, rows.dtype_name)
    matrices = engine.local_piece(
        ((num_ranks, num_ranks), torch.int32),
        ((rows.num_tokens, num_ranks), torch.int32),
        ((num_local,), torch.int32),
    )
    at_prefix, at_send_row, at_per_expert = matrices.addresses
    topk, capacity = plan.topk, plan.num_worst_tokens
    host_waits = capacity == 0
    if not host_waits:  # when there is no memory, nothing has been sent yet
        payload, side = receive.for_all(engine, rows, topk, capacity)
    ticket = engine.next_ticket() if host_waits else 0
    engine.run(
        library,
        lambda lib: lib.notify,
        _runtime.NotifyArgs(
            num_blocks=num_blocks,
            stream=engine.stream,
            num_tokens=rows.num_tokens,
            num_experts=num_experts,
            num_tokens_per_rank=plan.per_rank.data_ptr(),
            num_tokens_per_expert=plan.per_expert.data_ptr(),
            is_token_in_rank=plan.in_rank.data_ptr(),
            rank_prefix=at_prefix,
            send_row=at_send_row,
            num_recv_per_expert=at_per_expert,
            ticket=ticket,
        ),
    )
    try:
        num_topk = topk.num_topk if topk else 0
        call = _dispatch_args(rows, at_send_row, at_prefix)
        call.set(num_topk=num_topk, num_experts=num_experts, fill_tail=int(not host_waits))
        if topk is not None:
            call.set(
                idx_bytes=topk.ids.element_size(),
                topk_idx=pointer(topk.ids),
                topk_weights=pointer(topk.weights),
            )
        prefix, send_row, recv_per_expert = matrices.tensors()
        if host_waits:
            capacity = engine.received(ticket)
            payload, side = receive.for_all(engine, rows, topk, capacity)
        at_src_idx, *at_topk = side.addresses
        call.set(recv_src_idx=at_src_idx)
        if at_topk:
            call.set(recv_topk_idx=at_topk[0], recv_topk_weights=at_topk[1])
        _launch(engine, library, call, capacity, payload, num_blocks, side)
        engine.check_usable()  # counts are told before the flags behind them are looked at
        src_idx, *routing = side.tensors()
        topk_idx, topk_weights = routing if topk is not None else (None, None)
        per_expert = engine.received_per_expert() if host_waits else []
        unit = plan.expert_alignment
        if unit > 1:
            per_expert = [-(-count // unit) * unit for count in per_expert]
        handle = DispatchHandle(
            rank_prefix_matrix=prefix,
            channel_prefix_matrix=plan.per_rank.view(num_ranks, 1),
            recv_channel_prefix_matrix=engine.zero_column,
            recv_src_idx=src_idx,
            is_token_in_rank=plan.in_rank,
            send_head=send_row,
            num_experts=num_experts,
            num_topk=num_topk,
            num_recv_tokens=capacity if host_waits else None,
            num_recv_tokens_per_expert=recv_per_expert,
            recv_capacity=capacity,
            hidden=rows.hidden,
            elem_bytes=rows.x.element_size(),
            num_scales=rows.num_scales,
            buffer_id=buffer_id,
        )
        return Received(receive.as_given(payload), topk_idx, topk_weights, per_expert, handle)
    except BaseException as error:
        engine.fall_out_of_step()  # the peers have this rank's counts, and wait for its rows
        if isinstance(error, CapacityError) and host_waits:
            error.add_note("The peers have this rank's counts by now: call reset() on all ranks.")
        raise


def dispatch_cached(engine: Engine, rows: Rows, handle: DispatchHandle, num_blocks: int) -> Payload:
    """Sends the rows along the routing of `handle`."""
    send_row = handle.send_head
    if rows.num_tokens != send_row.shape[0]:
        raise ValueError(
            f"x has {rows.num_tokens} tokens, but the handle routes {handle.num_tokens}; dispatch "
            "the same tokens again, or make a new layout."
        )
    library = engine.library(rows.hidden, rows.dtype_name)
    shape = (rows.dtype_name, rows.hidden, rows.num_scales)
    call = handle.calls.get(shape)
    if call is None:
        call = _dispatch_args(rows, pointer(send_row), pointer(handle.rank_prefix_matrix))
        handle.calls[shape] = call
    else:
        _set_rows(call, rows)
    capacity = handle.recv_capacity
    payload = receive.for_payload(engine, rows, capacity)
    _launch(engine, library, call, capacity, payload, num_blocks, None)
    return receive.as_given(payload)


def _dispatch_args(rows: Rows, send_row: int, rank_prefix: int) -> _runtime.DispatchArgs:
    """The arguments of a dispatch that are known before its receive tensors."""
    call = _runtime.DispatchArgs(
        num_tokens=rows.num_tokens,
        hidden=rows.hidden,
        num_scales=rows.num_scales,
        idx_bytes=8,
        send_row=send_row,
        rank_prefix=rank_prefix,
    )
    _set_rows(call, rows)
    return call


def _set_rows(call: _runtime.DispatchArgs, rows: Rows) -> None:
    """The part of the arguments that differs between calls along one handle."""
    if rows.scales is None:
        call.set(x=pointer(rows.x))
        return
    token_stride, group_stride = rows.scales.stride()
    call.set(
        x=pointer(rows.x),
        x_scales=pointer(rows.scales),
        scale_token_stride=token_stride,
        scale_group_stride=group_stride,
    )


def _launch(
    engine: Engine,
    library: _runtime.Library,
    call: _runtime.DispatchArgs,
    capacity: int,
    payload: Memory,
    num_blocks: int,
    side: Memory | None,
) -> None:
    """Adds the receive tensors of the payload to a dispatch and runs it."""
    at_x, *at_scales = payload.addresses
    call.set(
        recv_x=at_x,
        recv_x_scales=at_scales[0] if at_scales else 0,
        recv_capacity=capacity,
        num_blocks=num_blocks,
        stream=engine.stream,
    )
    engine.run(library, lambda lib: lib.dispatch, call, keep=(payload, side))


class Sources(NamedTuple):
    """The checked arguments of a combine."""

    x: torch.Tensor
    weights: torch.Tensor | None
    bias_0: torch.Tensor | None
    bias_1: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the launched kernel reads."""
        return (self.x, self.weights, self.bias_0, self.bias_1)


def check_combine(
    engine: Engine,
    handle: AnyHandle,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
) -> Sources:
    """Checks what is to be combined along the routing of `handle`."""
    arguments.check_rows("x", x, (torch.bfloat16,), engine.device)
    if x.shape[0] != handle.recv_capacity:
        raise ValueError(
            f"x has {x.shape[0]} rows, but the dispatch of this handle returned "
            f"{handle.recv_capacity}; pass one row for each received row, in the same order."
        )
    shape = (handle.num_tokens, int(x.shape[1]))
    bias_0, bias_1 = arguments.check_bias(bias, shape, engine.device)
    weights = None
    if topk_weights is not None:
        weights = arguments.check_tensor(
            "topk_weights", topk_weights, (x.shape[0], None), (torch.float32,), engine.device
        ).contiguous()
        if not 1 <= weights.shape[1] <= arguments.MAX_TOPK:
            raise ValueError(
                f"topk_weights is {arguments.shape_of(weights)}, but must have 1 to "
                f"{arguments.MAX_TOPK} columns."
            )
    return Sources(x, weights, bias_0, bias_1)


def exported_sources(engine: Engine, sources: Sources) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where peers read the rows and the weights: where they lie, or memory to copy them to."""
    weights = None if sources.weights is None else engine.exported(sources.weights)
    return engine.exported(sources.x), weights


def combined_parts(sources: Sources, num_tokens: int) -> list[Part]:
    """What the results of a combine are."""
    parts: list[Part] = [((num_tokens, int(sources.x.shape[1])), torch.bfloat16)]
    if sources.weights is not None:
        parts.append(((num_tokens, int(sources.weights.shape[1])), torch.float32))
    return parts


def combine_rows(
    engine: Engine, handle: DispatchHandle, sources: Sources, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums each token's rows over the ranks that hold them."""
    num_tokens, (num_recv, hidden) = handle.num_tokens, sources.x.shape
    x_exported, weights_exported = exported_sources(engine, sources)
    made = engine.local_piece(*combined_parts(sources, num_tokens))
    num_topk = 0 if sources.weights is None else int(sources.weights.shape[1])
    library = engine.combine_library(hidden)
    engine.run(
        library,
        lambda lib: lib.combine,
        _runtime.CombineArgs(
            num_blocks=num_blocks,
            stream=engine.stream,
            num_tokens=num_tokens,
            num_recv=num_recv,
            hidden=hidden,
            num_topk=num_topk,
            x=pointer(sources.x),
            x_exported=pointer(x_exported),
            topk_weights=pointer(sources.weights),
            topk_weights_exported=pointer(weights_exported),
            bias_0=pointer(sources.bias_0),
            bias_1=pointer(sources.bias_1),
            send_row=pointer(handle.send_head),
            combined_x=made.addresses[0],
            combined_topk_weights=made.addresses[1] if num_topk else 0,
        ),
        keep=(*sources.tensors(), x_exported, weights_exported),
    )
    combined, *weights = made.tensors()
    return combined, weights[0] if weights else None
