"""Config, the default configurations, and DeepEP V1's buffer size formulas.

Of a Config this library uses only `num_sms`. The other fields describe V1's bounded queues, which
do not exist here; they are kept, checked and used in V1's size formulas so that code written for V1
runs unchanged. No buffer has to be sized by hand: receive tensors are ordinary tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

V1_NODE_SIZE = 8
"""Ranks of a node in V1's formulas."""

_SOURCE_META_BYTES = 8
_MAX_TOPK = 128  # assumed by V1's hints, whatever the call uses
_MAX_SCALES = 128
_INDEX_BYTES = 8  # topk_idx_t is int64


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Config:
    """V1's tuning record; same constructor, same checks. Fields can be read, not changed.

    Attributes:
        num_sms: SMs (on the host: no effect) that an operation may use.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: V1's NVLink queue, tokens.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: V1's RDMA queue, tokens;
            the latter is rounded up to a multiple of the former.

    Raises:
        ValueError: a field breaks one of V1's rules; the text has the values and the rule.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms={self.num_sms}: must be at least 0.")
        self._check_queue(
            "nvl", self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        )
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if send > 0 and recv > 0:
            recv = _round_up(recv, send)
            object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", recv)
        self._check_queue("rdma", send, recv)
        if send > recv // 2:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens={send} with num_max_rdma_chunked_recv_tokens="
                f"{recv} (rounded up): the first must be at most half of the second."
            )

    @staticmethod
    def _check_queue(kind: str, send: int, recv: int) -> None:
        if send <= 0 or recv <= 0 or send >= recv:
            raise ValueError(
                f"num_max_{kind}_chunked_send_tokens={send}, num_max_{kind}_chunked_recv_tokens="
                f"{recv}: both must be above 0 and the first below the second."
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of V1's NVLink buffer. This library does not need it: any num_nvl_bytes will do.

        Equals V1 exactly for the rank counts V1 accepts (below 8, and multiples of 8); for others
        the last node is counted as full.

        Args:
            hidden_bytes: hidden size times max(element size, 2).
            num_ranks: ranks of the group.

        Raises:
            ValueError: an argument below 1, or an odd num_sms with more than 8 ranks.
        """
        num_nodes = self._num_nodes(hidden_bytes, num_ranks)
        peers = min(num_ranks, V1_NODE_SIZE)
        channels = self.num_sms // 2
        meta = channels * peers * (2 * num_nodes + 3) * 4
        rows = channels * peers * self.num_max_nvl_chunked_recv_tokens
        return _round_up(meta + rows * self._slot_bytes(hidden_bytes), 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of V1's RDMA buffer; 0 for up to 8 ranks. This library does not need it.

        Arguments, rank counts and errors as in get_nvl_buffer_size_hint.
        """
        num_nodes = self._num_nodes(hidden_bytes, num_ranks)
        if num_ranks <= V1_NODE_SIZE:
            return 0
        channels = self.num_sms // 2
        meta = channels * num_nodes * (V1_NODE_SIZE * 2 + 2) * 2 * 4
        rows = channels * num_nodes * self.num_max_rdma_chunked_recv_tokens * 2
        return _round_up(meta + rows * (self._slot_bytes(hidden_bytes) + 16), 128)

    def _num_nodes(self, hidden_bytes: int, num_ranks: int) -> int:
        if hidden_bytes < 1:
            raise ValueError(f"hidden_bytes={hidden_bytes}: must be at least 1.")
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: must be at least 1.")
        if num_ranks > V1_NODE_SIZE and self.num_sms % 2:
            raise ValueError(
                f"num_sms={self.num_sms} with {num_ranks} ranks: V1 uses two SMs per channel "
                "between nodes, so num_sms must be even. Call Buffer.set_num_sms with an even "
                "number."
            )
        return -(-num_ranks // V1_NODE_SIZE)

    @staticmethod
    def _slot_bytes(hidden_bytes: int) -> int:
        topk = _MAX_TOPK * (_INDEX_BYTES + 4)
        return hidden_bytes + _SOURCE_META_BYTES + topk + _MAX_SCALES * 4


Operation = Literal["dispatch", "combine"]
_Queues = tuple[int, int, int, int]

# Ranks -> (NVLink send, NVLink receive, RDMA send, RDMA receive): V1's tuned values.
_DISPATCH_QUEUES: dict[int, _Queues] = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE_QUEUES: dict[int, _Queues] = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def default_config(
    operation: Operation, num_ranks: int, num_sms: int = 20, ranks_per_node: int = V1_NODE_SIZE
) -> Config:
    """The configuration used when a caller passes none. Every rank count has one.

    V1's table holds 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144 and 160 ranks; these give V1's
    values. Any other count takes the row of the next larger listed count (above 160: the row of
    160). Its NVLink receive queue is then enlarged as far as V1's rule for several nodes asks: a
    multiple of the number of nodes, with at least one send chunk for each node.

    Args:
        operation: "dispatch" or "combine".
        num_ranks: ranks of the group, at least 1.
        num_sms: becomes Config.num_sms.
        ranks_per_node: V1's value is 8.

    Raises:
        ValueError: an argument is out of range.
    """
    if num_ranks < 1 or ranks_per_node < 1:
        raise ValueError(
            f"num_ranks={num_ranks}, ranks_per_node={ranks_per_node}: both must be at least 1."
        )
    if operation not in ("dispatch", "combine"):
        raise ValueError(f"operation={operation!r}: must be 'dispatch' or 'combine'.")
    table = _DISPATCH_QUEUES if operation == "dispatch" else _COMBINE_QUEUES
    row = min((listed for listed in table if listed >= num_ranks), default=max(table))
    nvl_send, nvl_recv, rdma_send, rdma_recv = table[row]
    num_nodes = -(-num_ranks // ranks_per_node)
    if num_nodes > 1:
        nvl_recv = max(_round_up(nvl_recv, num_nodes), nvl_send * num_nodes)
    return Config(num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv)


def default_dispatch_config(num_ranks: int, num_sms: int = 20) -> Config:
    """default_config("dispatch", ...): what Buffer.get_dispatch_config returns."""
    return default_config("dispatch", num_ranks, num_sms)


def default_combine_config(num_ranks: int, num_sms: int = 20) -> Config:
    """default_config("combine", ...): what Buffer.get_combine_config returns."""
    return default_config("combine", num_ranks, num_sms)


def v1_low_latency_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes of V1's low-latency RDMA buffer, for reference. Independent of num_ranks.

    V1's rule that the messages be multiples of 16 bytes is kept.

    Args:
        num_max_dispatch_tokens_per_rank: tokens, the same on every rank.
        hidden: elements of a row.
        num_ranks: ranks of the group; accepted for compatibility.
        num_experts: experts of the whole group.

    Raises:
        ValueError: an argument below 1, or a message size V1 does not allow.
    """
    tokens, experts = num_max_dispatch_tokens_per_rank, num_experts
    if min(tokens, hidden, num_ranks, experts) < 1:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank={tokens}, hidden={hidden}, num_ranks={num_ranks}, "
            f"num_experts={experts}: all must be at least 1."
        )
    scale_bytes = hidden // 128 * 4
    dispatch_message = 16 + max(2 * hidden, hidden + scale_bytes)
    combine_slot = scale_bytes + 2 * hidden
    send = max(tokens * dispatch_message, experts * tokens * combine_slot)
    recv = max(experts * tokens * dispatch_message, experts * tokens * combine_slot)
    if send % 16 or recv % 16:
        raise ValueError(
            f"hidden={hidden} gives regions of {send} and {recv} bytes; V1 needs multiples of "
            "16. Any hidden size that is a multiple of 512 has them."
        )
    signals = _round_up(4 * experts, 128)
    total = 2 * send + 2 * recv + 2 * signals
    return (total + 128) // 128 * 128
