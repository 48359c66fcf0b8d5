"""What is behind Buffer.get_dispatch_layout, dispatch and combine where the group spans nodes.

As deepep.routing, whose checks come first. Letters: N nodes of L ranks, R ranks, T tokens of this
rank, K top-k, n received rows, F forwarded tokens.
"""

from __future__ import annotations

import torch

from deepep import _runtime, receive, topology
from deepep.arguments import Payload, Rows, Topk
from deepep.blocks import Memory
from deepep.engine import Engine
from deepep.internode_handle import InternodeHandle
from deepep.routing import Plan, Received, Sources, combined_parts, exported_sources, pointer

TOPOLOGY: topology.Topology = "internode"
_INT32 = torch.int32


def layout(
    engine: Engine, topk: Topk, num_experts: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens per rank [R], per node [N], per expert, and bool [T, R]: who needs which token."""
    nodes, num_tokens = engine.nodes, topk.ids.shape[0]
    made = engine.local_piece(
        ((engine.num_ranks,), _INT32),
        ((nodes.num_nodes,), _INT32),
        ((num_experts,), _INT32),
        ((num_tokens, engine.num_ranks), torch.bool),
    )
    at_ranks, at_nodes, at_experts, at_flags = made.addresses
    engine.layout(
        _runtime.InternodeLayoutArgs(
            num_blocks=num_blocks,
            stream=engine.stream,
            num_nodes=nodes.num_nodes,
            ranks_per_node=nodes.ranks_per_node,
            num_experts=num_experts,
            num_tokens=num_tokens,
            num_topk=topk.num_topk,
            idx_bytes=topk.ids.element_size(),
            topk_idx=topk.ids.data_ptr(),
            num_tokens_per_rank=at_ranks,
            num_tokens_per_node=at_nodes,
            num_tokens_per_expert=at_experts,
            is_token_in_rank=at_flags,
            scratch=engine.layout_scratch,
        )
    )
    per_rank, per_node, per_expert, in_rank = made.tensors()
    return per_rank, per_node, per_expert, in_rank


def dispatch_fresh(
    engine: Engine,
    buffer_id: int,
    rows: Rows,
    plan: Plan,
    num_blocks: int,
    max_tokens_per_rank: int | None,
) -> Received:
    """Exchanges counts, makes the receive tensors and sends the rows; as routing.dispatch_fresh."""
    nodes, num_ranks, num_experts = engine.nodes, engine.num_ranks, plan.num_experts
    assert plan.per_node is not None
    num_local = topology.num_local_experts(num_experts, num_ranks, engine.rank)
    library = engine.library(rows.hidden, rows.dtype_name, TOPOLOGY)
    notes = engine.local(
        ((num_ranks,), _INT32),
        ((rows.num_tokens, num_ranks), _INT32),
        ((rows.num_tokens, nodes.num_nodes), _INT32),
        ((nodes.num_nodes, nodes.ranks_per_node), _INT32),
        ((nodes.num_nodes,), _INT32),
        ((num_local,), _INT32),
    )
    recv_prefix, send_row, node_row, forward_first, forward_prefix, recv_per_expert = notes
    topk, capacity = plan.topk, plan.num_worst_tokens
    host_waits = capacity == 0
    if not host_waits:  # when there is no memory, nothing has been sent yet
        forwarded = most_forwarded(engine, capacity, rows.num_tokens, max_tokens_per_rank)
        payload, side = receive.for_all(engine, rows, topk, capacity)
    ticket = engine.next_ticket() if host_waits else 0
    network = engine.network
    engine.run(
        library,
        lambda lib: lambda domain, args: lib.internode_notify(domain, network, args),
        _runtime.InternodeNotifyArgs(
            num_blocks=num_blocks,
            stream=engine.stream,
            num_tokens=rows.num_tokens,
            num_experts=num_experts,
            num_tokens_per_rank=plan.per_rank.data_ptr(),
            num_tokens_per_node=plan.per_node.data_ptr(),
            num_tokens_per_expert=plan.per_expert.data_ptr(),
            is_token_in_rank=plan.in_rank.data_ptr(),
            recv_prefix=recv_prefix.data_ptr(),
            send_row=send_row.data_ptr(),
            node_row=node_row.data_ptr(),
            forward_first=forward_first.data_ptr(),
            forward_prefix=forward_prefix.data_ptr(),
            num_recv_per_expert=recv_per_expert.data_ptr(),
            ticket=ticket,
        ),
    )
    try:
        if host_waits:
            capacity = engine.received(ticket)
            forwarded = engine.domain.num_forwarded
            payload, side = receive.for_all(engine, rows, topk, capacity)
        forward_row, forward_token = engine.local(
            ((forwarded, nodes.ranks_per_node), _INT32), ((forwarded,), _INT32)
        )
        src_idx, *routing = side.tensors()
        topk_idx, topk_weights = routing if topk is not None else (None, None)
        num_topk = topk.num_topk if topk else 0
        handle = InternodeHandle(
            (
                plan.in_rank,
                plan.per_node.view(nodes.num_nodes, 1),
                plan.per_rank.view(num_ranks, 1),
                engine.zero_column[: nodes.num_nodes],
                forward_prefix,
                engine.zero_column,
                recv_prefix,
                src_idx,
                node_row,
                forward_row,
            ),
            send_row=send_row,
            forward_first=forward_first,
            forward_token=forward_token,
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
        call = _dispatch_args(rows, handle)
        call.set(
            num_topk=num_topk,
            num_experts=num_experts,
            fill_tail=int(not host_waits),
            forward_row=forward_row.data_ptr() or _NOWHERE,
            forward_token=forward_token.data_ptr() or _NOWHERE,
            recv_src_idx=pointer(src_idx),
        )
        if topk is not None:
            call.set(
                idx_bytes=topk.ids.element_size(),
                topk_idx=pointer(topk.ids),
                topk_weights=pointer(topk.weights),
                recv_topk_idx=pointer(topk_idx),
                recv_topk_weights=pointer(topk_weights),
            )
        _launch(engine, library, call, capacity, payload, num_blocks, side)
        engine.check_usable()  # counts are told before the flags behind them are looked at
        per_expert = engine.received_per_expert() if host_waits else []
        unit = plan.expert_alignment
        per_expert = [-(-count // unit) * unit for count in per_expert]
        return Received(receive.as_given(payload), topk_idx, topk_weights, per_expert, handle)
    except BaseException:
        engine.fall_out_of_step()  # the peers have this rank's counts, and wait for its rows
        raise


_NOWHERE = 1
"""In place of the address of an empty tensor, where 0 would say that nobody wants it."""


_LEAST_FORWARDED = 4096


def most_forwarded(
    engine: Engine, capacity: int, num_tokens: int, max_tokens_per_rank: int | None
) -> int:
    """Room for notes about the tokens that this rank forwards, where the host does not know their
    number: for as many as can get there if `capacity` holds on all ranks of the node, and if the
    ranks of the rail have up to twice this one's tokens."""
    others = engine.nodes.num_nodes - 1
    most = max(capacity * engine.nodes.ranks_per_node, 2 * others * num_tokens, _LEAST_FORWARDED)
    if max_tokens_per_rank is not None:
        most = others * max_tokens_per_rank  # exactly what there can be
    return min(most, 2**31 - 1)


def dispatch_cached(
    engine: Engine, rows: Rows, handle: InternodeHandle, num_blocks: int
) -> Payload:
    """Sends the rows along the routing of `handle`."""
    if rows.num_tokens != handle.num_tokens:
        raise ValueError(
            f"x has {rows.num_tokens} tokens, but the handle routes {handle.num_tokens}; dispatch "
            "the same tokens again, or make a new layout."
        )
    library = engine.library(rows.hidden, rows.dtype_name, TOPOLOGY)
    payload = receive.for_payload(engine, rows, handle.recv_capacity)
    call = _dispatch_args(rows, handle)
    _launch(engine, library, call, handle.recv_capacity, payload, num_blocks, None)
    return receive.as_given(payload)


def _dispatch_args(rows: Rows, handle: InternodeHandle) -> _runtime.InternodeDispatchArgs:
    """What is known before the receive tensors, without what travels beside rows."""
    strides = (0, 0) if rows.scales is None else rows.scales.stride()
    return _runtime.InternodeDispatchArgs(
        num_tokens=rows.num_tokens,
        hidden=rows.hidden,
        num_scales=rows.num_scales,
        idx_bytes=8,
        x=pointer(rows.x),
        x_scales=pointer(rows.scales),
        scale_token_stride=strides[0],
        scale_group_stride=strides[1],
        recv_prefix=pointer(handle.recv_prefix),
        send_row=pointer(handle.send_row),
        node_row=pointer(handle.node_row),
        forward_first=pointer(handle.forward_first),
        forward_prefix=pointer(handle.forward_prefix),
        forward_capacity=handle.forward_row.shape[0],
    )


def _launch(
    engine: Engine,
    library: _runtime.Library,
    call: _runtime.InternodeDispatchArgs,
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
    network = engine.network
    engine.run(
        library,
        lambda lib: lambda domain, args: lib.internode_dispatch(domain, network, args),
        call,
        keep=(payload, side),
    )


def combine_rows(
    engine: Engine, handle: InternodeHandle, sources: Sources, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums each token's rows, over the ranks of each node, then over the nodes."""
    num_tokens, (num_recv, hidden) = handle.num_tokens, sources.x.shape
    x_exported, weights_exported = exported_sources(engine, sources)
    made = engine.local_piece(*combined_parts(sources, num_tokens))
    num_topk = 0 if sources.weights is None else int(sources.weights.shape[1])
    network = engine.network
    engine.run(
        engine.combine_library(hidden, TOPOLOGY),
        lambda lib: lambda domain, args: lib.internode_combine(domain, network, args),
        _runtime.InternodeCombineArgs(
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
            send_row=pointer(handle.send_row),
            node_row=pointer(handle.node_row),
            forward_prefix=pointer(handle.forward_prefix),
            forward_row=pointer(handle.forward_row),
            forward_token=pointer(handle.forward_token),
            combined_x=made.addresses[0],
            combined_topk_weights=made.addresses[1] if num_topk else 0,
        ),
        keep=(*sources.tensors(), x_exported, weights_exported),
    )
    combined, *weights = made.tensors()
    return combined, weights[0] if weights else None
