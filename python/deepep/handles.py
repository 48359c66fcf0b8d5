"""The handle that dispatch returns and that combine and later dispatches take.

It is a tuple of DeepEP V1's six tensors, in V1's order, so code that unpacks or indexes it works.
What V1 has no place for is kept in attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from deepep.errors import BufferStateError

if TYPE_CHECKING:
    import torch

    _SixTensors = tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
    ]
else:
    _SixTensors = tuple


class Immutable:
    """What handles have in common: they are themselves only, and stay as they were made."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; {name} cannot be set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; {name} cannot be deleted.")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A {type(self).__name__} belongs to a live Buffer and cannot be pickled or copied."
        )

    # Comparing tuples of tensors element by element raises in torch; a handle is itself only.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)


class DispatchHandle(Immutable, _SixTensors):
    """How one dispatch routed its tokens. Immutable; usable any number of times, on any stream.

    R ranks, T tokens of this rank, n received rows (the capacity under num_worst_tokens), El local
    experts. All tensors are on the Buffer's device.

    The tuple:
        0 rank_prefix_matrix: int32 [R, R]; [i, r] is the number of rows that rank r gets from ranks
          0..i. All columns are defined (V1: only this rank's).
        1 channel_prefix_matrix: int32 [R, 1]; rows that this rank sends to each rank. There is one
          channel, because rows are written to their place without queues.
        2 recv_channel_prefix_matrix: int32 [R, 1]; zeros: each source's block has one channel.
        3 recv_src_idx: int32 [n]; index of each received row on its source rank.
        4 is_token_in_rank: bool [T, R], as given.
        5 send_head: int32 [T, R]; row of the token in the receiver's tensor, or -1 when it is not
          sent there. (V1: number within a queue, and combine changes it. Here nothing does.)

    Attributes:
        num_experts: experts of the whole group.
        num_topk: columns of the top-k tensors; 0 when none were given.
        num_recv_tokens: received rows; None under num_worst_tokens, where the host does not know.
        num_recv_tokens_per_expert: int32 [El]; received selections, not rounded to an alignment.
        recv_capacity: rows of the receive tensors; equals num_recv_tokens when that is known.
        hidden: elements of a row.
        elem_bytes: bytes of an element of the dispatched rows (2 for BF16, 1 for FP8).
        num_scales: scales per row; 0 for BF16.
        buffer_id: which Buffer made it; see check_owner.
        calls: prepared arguments of cached dispatches, by shape; the Buffer's own.
    """

    num_experts: int
    num_topk: int
    num_recv_tokens: int | None
    num_recv_tokens_per_expert: torch.Tensor
    recv_capacity: int
    hidden: int
    elem_bytes: int
    num_scales: int
    buffer_id: int
    calls: dict[Any, Any]

    def __new__(
        cls,
        *,
        rank_prefix_matrix: torch.Tensor,
        channel_prefix_matrix: torch.Tensor,
        recv_channel_prefix_matrix: torch.Tensor,
        recv_src_idx: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        send_head: torch.Tensor,
        num_experts: int,
        num_topk: int,
        num_recv_tokens: int | None,
        num_recv_tokens_per_expert: torch.Tensor,
        recv_capacity: int,
        hidden: int,
        elem_bytes: int,
        num_scales: int,
        buffer_id: int,
    ) -> DispatchHandle:
        self = super().__new__(
            cls,
            (
                rank_prefix_matrix,
                channel_prefix_matrix,
                recv_channel_prefix_matrix,
                recv_src_idx,
                is_token_in_rank,
                send_head,
            ),
        )
        self.__dict__.update(
            num_experts=num_experts,
            num_topk=num_topk,
            num_recv_tokens=num_recv_tokens,
            num_recv_tokens_per_expert=num_recv_tokens_per_expert,
            recv_capacity=recv_capacity,
            hidden=hidden,
            elem_bytes=elem_bytes,
            num_scales=num_scales,
            buffer_id=buffer_id,
            calls={},
        )
        return self

    @property
    def rank_prefix_matrix(self) -> torch.Tensor:
        return self[0]

    @property
    def channel_prefix_matrix(self) -> torch.Tensor:
        return self[1]

    @property
    def recv_channel_prefix_matrix(self) -> torch.Tensor:
        return self[2]

    @property
    def recv_src_idx(self) -> torch.Tensor:
        return self[3]

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        return self[4]

    @property
    def send_head(self) -> torch.Tensor:
        return self[5]

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank: rows of the dispatch's input and of the combine's result."""
        return int(self.is_token_in_rank.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.is_token_in_rank.shape[1])

    def __repr__(self) -> str:
        return (
            f"DispatchHandle(buffer_id={self.buffer_id}, num_ranks={self.num_ranks}, "
            f"num_tokens={self.num_tokens}, num_recv_tokens={self.num_recv_tokens}, "
            f"num_experts={self.num_experts}, num_topk={self.num_topk}, hidden={self.hidden})"
        )


class _Owned(Protocol):
    """A handle that knows its Buffer."""

    @property
    def buffer_id(self) -> int: ...


def check_owner(handle: _Owned, buffer_id: int) -> None:
    """Raises BufferStateError when another Buffer made this handle."""
    if handle.buffer_id != buffer_id:
        raise BufferStateError(
            f"The handle comes from Buffer {handle.buffer_id}, this is Buffer {buffer_id}. A "
            "handle holds rows and counts of one Buffer: pass it to the Buffer whose dispatch "
            "returned it."
        )


if TYPE_CHECKING:
    _LowLatencyTuple = tuple[torch.Tensor, torch.Tensor, int, int, int]
else:
    _LowLatencyTuple = tuple


class LowLatencyHandle(Immutable, _LowLatencyTuple):
    """How one low-latency dispatch routed its tokens. Immutable.

    R ranks, M tokens of a rank at most, T tokens of this rank, K top-k, El local experts.

    The tuple, as in V1:
        0 src_info: int32 [El, R * M]; index of each received row on its source rank (a view with
          a stride of 2).
        1 layout_range: int64 [El, R]; rows from the rank in the low 32 bits, its first row in the
          high ones. Sources are in the order of ranks.
        2 num_max_dispatch_tokens_per_rank, 3 hidden, 4 num_experts.

    Attributes:
        recv_source: int64 [El, R * M]; src_info in the low 32 bits, and token * K + k, which tells
          the selection that a row answers, in the high ones.
        send_index: int32 [T, K]; number of the selection among this rank's rows for its expert.
        num_tokens, num_topk: T and K of the dispatch.
        buffer_id: which Buffer made it.
    """

    recv_source: torch.Tensor
    send_index: torch.Tensor
    num_tokens: int
    num_topk: int
    buffer_id: int

    def __new__(
        cls,
        *,
        recv_source: torch.Tensor,
        layout_range: torch.Tensor,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        send_index: torch.Tensor,
        buffer_id: int,
    ) -> LowLatencyHandle:
        import torch

        words = recv_source.view(torch.int32)
        src_info = words.view(*recv_source.shape, 2)[..., 0]
        self = super().__new__(cls, (src_info, layout_range, max_tokens, hidden, num_experts))
        num_tokens, num_topk = send_index.shape
        self.__dict__.update(
            recv_source=recv_source,
            send_index=send_index,
            num_tokens=int(num_tokens),
            num_topk=int(num_topk),
            buffer_id=buffer_id,
        )
        return self


def require_low_latency_handle(handle: object, buffer_id: int) -> LowLatencyHandle:
    """Checks what a user passed as `handle=`; raises as require_handle does."""
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            f"handle is a {type(handle).__qualname__}; pass the LowLatencyHandle that "
            "low_latency_dispatch returned, unchanged."
        )
    if handle.buffer_id != buffer_id:
        raise BufferStateError(
            f"The handle comes from Buffer {handle.buffer_id}, this is Buffer {buffer_id}; pass it "
            "to the Buffer whose low_latency_dispatch returned it."
        )
    return handle


def require_handle(handle: object, buffer_id: int) -> DispatchHandle:
    """Checks what a user passed as `handle=`.

    Raises:
        TypeError: it is not a DispatchHandle, for example a plain tuple of its tensors.
        BufferStateError: another Buffer made it.
    """
    if not isinstance(handle, DispatchHandle):
        raise TypeError(
            f"handle is a {type(handle).__qualname__}; pass the DispatchHandle that dispatch "
            "returned, unchanged (a tuple rebuilt from its tensors lacks the counts)."
        )
    check_owner(handle, buffer_id)
    return handle
