"""The handle of a dispatch across nodes: a tuple of DeepEP V1's ten tensors, in V1's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepep.handles import DispatchHandle, Immutable, check_owner

if TYPE_CHECKING:
    import torch

    _Tensors = tuple[torch.Tensor, ...]
else:
    _Tensors = tuple


class InternodeHandle(Immutable, _Tensors):
    """How one dispatch routed its tokens over nodes. Immutable; usable any number of times.

    N nodes of L ranks, R ranks, T tokens of this rank, n received rows (the capacity under
    num_worst_tokens), F tokens of other nodes that this rank put in place, El local experts.

    The tuple:
        0 is_token_in_rank: bool [T, R], as given.
        1 rdma_channel_prefix_matrix: int32 [N, 1]; tokens of this rank for each node. There is one
          channel here, since places do not depend on channels.
        2 gbl_channel_prefix_matrix: int32 [R, 1]; tokens of this rank for each rank.
        3 recv_rdma_channel_prefix_matrix: int32 [N, 1]; zeros: each node's block has one channel.
        4 recv_rdma_rank_prefix_sum: int32 [N]; tokens that this rank forwards for nodes 0..i (V1:
          and those of its own node).
        5 recv_gbl_channel_prefix_matrix: int32 [R, 1]; zeros, as 3.
        6 recv_gbl_rank_prefix_sum: int32 [R]; rows that this rank gets from ranks 0..i.
        7 recv_src_meta: int32 [n]; index of each received row on its source rank (V1: two words,
          of node and ranks).
        8 send_rdma_head: int32 [T, N]; number of the token among those of this rank for another
          node, or -1.
        9 send_nvl_head: int32 [F, L]; row of each forwarded token in the tensor of each rank of
          this node, or -1.

    Attributes:
        send_row: int32 [T, R]; for a rank of this node the token's row in its tensor, for others
            its number among the tokens for that rank; -1: not sent there.
        forward_first: int32 [N, L]; where the forwarded rows of each node begin at each rank here.
        forward_token: int32 [F]; index of each forwarded token on its source rank.
        num_experts, num_topk, num_recv_tokens, num_recv_tokens_per_expert, recv_capacity, hidden,
        elem_bytes, num_scales, buffer_id: as in DispatchHandle.
    """

    send_row: torch.Tensor
    forward_first: torch.Tensor
    forward_token: torch.Tensor
    num_experts: int
    num_topk: int
    num_recv_tokens: int | None
    num_recv_tokens_per_expert: torch.Tensor
    recv_capacity: int
    hidden: int
    elem_bytes: int
    num_scales: int
    buffer_id: int

    def __new__(
        cls,
        tensors: _Tensors,
        *,
        send_row: torch.Tensor,
        forward_first: torch.Tensor,
        forward_token: torch.Tensor,
        **facts: Any,
    ) -> InternodeHandle:
        """`facts`: the other attributes."""
        self = super().__new__(cls, tensors)
        self.__dict__.update(
            send_row=send_row, forward_first=forward_first, forward_token=forward_token, **facts
        )
        return self

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        return self[0]

    @property
    def forward_prefix(self) -> torch.Tensor:
        return self[4]

    @property
    def recv_prefix(self) -> torch.Tensor:
        return self[6]

    @property
    def recv_src_idx(self) -> torch.Tensor:
        return self[7]

    @property
    def node_row(self) -> torch.Tensor:
        return self[8]

    @property
    def forward_row(self) -> torch.Tensor:
        return self[9]

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank: rows of the dispatch's input and of the combine's result."""
        return int(self.is_token_in_rank.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.is_token_in_rank.shape[1])

    def __repr__(self) -> str:
        return (
            f"InternodeHandle(buffer_id={self.buffer_id}, num_ranks={self.num_ranks}, "
            f"num_tokens={self.num_tokens}, num_recv_tokens={self.num_recv_tokens}, "
            f"num_experts={self.num_experts}, num_topk={self.num_topk}, hidden={self.hidden})"
        )


def require_internode_handle(handle: object, buffer_id: int) -> InternodeHandle:
    """Checks what a user passed as `handle=`; raises as require_handle does."""
    if not isinstance(handle, InternodeHandle):
        raise TypeError(
            f"handle is a {type(handle).__qualname__}; pass the InternodeHandle that dispatch "
            "returned, unchanged (a tuple rebuilt from its tensors lacks the counts)."
        )
    check_owner(handle, buffer_id)
    return handle


AnyHandle = DispatchHandle | InternodeHandle
"""What dispatch returns: the second where the group spans nodes."""
