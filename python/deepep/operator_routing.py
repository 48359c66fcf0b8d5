"""What torch operators pass on of a dispatch, as three tensors whatever the topology.

Handles are objects of one Buffer and cannot cross an operator. Letters as in deepep.internode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepep import internode
from deepep.buffer import Buffer
from deepep.handles import DispatchHandle
from deepep.internode_handle import AnyHandle, InternodeHandle


class Routing(NamedTuple):
    """What combine and backward need of a dispatch.

    Attributes:
        rank_prefix_matrix: int32 [R, R], part 0 of a DispatchHandle. Where the Buffer spans nodes
            int32 [R + N + N * L + T * N + F * (L + 1)]: what an InternodeHandle has beside the
            other two, one after the other.
        recv_src_idx: int32 [n].
        send_head: int32 [T, R]; send_row of an InternodeHandle.
    """

    rank_prefix_matrix: torch.Tensor
    recv_src_idx: torch.Tensor
    send_head: torch.Tensor

    def handle(self, owner: Buffer) -> AnyHandle:
        """A handle that combine and a cached dispatch can work with; never leaves operators."""
        # Of the facts only the shape of some is looked at, or nothing.
        facts = {
            "recv_capacity": self.recv_src_idx.shape[0],
            "buffer_id": owner._id,
            "num_recv_tokens_per_expert": self.rank_prefix_matrix,
            "num_recv_tokens": None,
            "num_experts": 0,
            "num_topk": 0,
            "hidden": 0,
            "elem_bytes": 2,
            "num_scales": 0,
        }
        if owner._engine.nodes.num_nodes > 1:
            return self._over_nodes(owner, facts)
        return DispatchHandle(
            rank_prefix_matrix=self.rank_prefix_matrix,
            recv_src_idx=self.recv_src_idx,
            send_head=self.send_head,
            is_token_in_rank=self.send_head,
            channel_prefix_matrix=self.rank_prefix_matrix,
            recv_channel_prefix_matrix=self.rank_prefix_matrix,
            **facts,  # type: ignore[arg-type]
        )

    def _over_nodes(self, owner: Buffer, facts: dict[str, object]) -> InternodeHandle:
        nodes, (tokens, ranks) = owner._engine.nodes, self.send_head.shape
        sizes = [ranks, nodes.num_nodes, nodes.num_nodes * nodes.ranks_per_node]
        sizes.append(tokens * nodes.num_nodes)
        width = nodes.ranks_per_node + 1
        forwarded = (self.rank_prefix_matrix.shape[0] - sum(sizes)) // width
        sizes += [forwarded * nodes.ranks_per_node, forwarded]
        parts = torch.split(self.rank_prefix_matrix, sizes)
        prefix, forward_prefix, first, node_row, row, token = parts
        unused = self.send_head  # by a cached dispatch and a combine
        return InternodeHandle(
            (
                self.send_head,
                unused,
                unused,
                unused,
                forward_prefix,
                unused,
                prefix,
                self.recv_src_idx,
                node_row.view(tokens, nodes.num_nodes),
                row.view(forwarded, nodes.ranks_per_node),
            ),
            send_row=self.send_head,
            forward_first=first.view(nodes.num_nodes, nodes.ranks_per_node),
            forward_token=token,
            **facts,
        )


def of_handle(handle: AnyHandle) -> Routing:
    """What a handle is to the operators."""
    if isinstance(handle, DispatchHandle):
        return Routing(handle.rank_prefix_matrix, handle.recv_src_idx, handle.send_head)
    parts = (
        handle.recv_prefix,
        handle.forward_prefix,
        handle.forward_first,
        handle.node_row,
        handle.forward_row,
        handle.forward_token,
    )
    notes = torch.cat([part.flatten() for part in parts])
    return Routing(notes, handle.recv_src_idx, handle.send_row)


def shapes(owner: Buffer, x: torch.Tensor, rows: int, unknown: int | None) -> Routing:
    """The same as empty tensors, for tracing. `unknown`: a size that stands for what data decides;
    None where the number of rows is fixed."""
    nodes, ranks, tokens = owner._engine.nodes, owner.group_size, x.shape[0]
    size: tuple[int, ...] = (ranks, ranks)
    if nodes.num_nodes > 1:
        if unknown is None:
            most = internode.most_forwarded(owner._engine, rows, tokens, owner.max_tokens_per_rank)
            known = ranks + nodes.num_nodes * (1 + nodes.ranks_per_node + tokens)
            unknown = known + most * (nodes.ranks_per_node + 1)
        size = (unknown,)
    return Routing(
        x.new_empty(size, dtype=torch.int32),
        x.new_empty((rows,), dtype=torch.int32),
        x.new_empty((tokens, ranks), dtype=torch.int32),
    )
