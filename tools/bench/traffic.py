"""Counts bytes: those that DeepEP V1's benchmark reports, and those that memory really sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.shapes import Shape

INDEX_BYTES = 8
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Flow:
    """What each rank sends and receives.

    Attributes:
        rows: rows[s][d] is the number of rows from rank s to rank d, d == s included.
        sent: tokens of each rank that go to at least one rank; each of them is read once.
    """

    rows: Sequence[Sequence[int]]
    sent: Sequence[int]

    @property
    def received(self) -> list[int]:
        """Rows that each rank receives."""
        return [sum(column) for column in zip(*self.rows, strict=True)]


def v1_bytes(shape: Shape, flow: Flow) -> list[int]:
    """V1's convention, by rank: payload and scales of the received rows, the rank's own included.

    V1 counts a combine by the bytes of the dispatch before it. Layout has none.
    """
    row = shape.payload_bytes + shape.scale_bytes
    return [rows * row for rows in flow.received]


def memory_bytes(operation: str, shape: Shape, flow: Flow, capacity: int = 0) -> list[int]:
    """Bytes read plus bytes written in each rank's own memory, every input read once.

    Args:
        operation: a key of shapes.OPERATIONS.
        capacity: rows of the fixed-size output of dispatch_worst.
    """
    return [_of_rank(operation, shape, flow, rank, capacity) for rank in range(shape.ranks)]


def _of_rank(operation: str, shape: Shape, flow: Flow, rank: int, capacity: int) -> int:
    received, sent = flow.received[rank], flow.sent[rank]
    choice = shape.topk * INDEX_BYTES
    flags = shape.tokens * shape.ranks  # is_token_in_rank, 1 byte each
    places = 4 * flags  # send_head: the row of each token on each rank
    if operation == "layout":
        return shape.tokens * choice + flags + 4 * (shape.experts + shape.ranks)
    if operation.startswith("combine"):
        row = 2 * shape.hidden
        copies = 2 * received * row if operation == "combine_any" else 0
        return places + copies + (received + shape.tokens) * row
    row = shape.payload_bytes + shape.scale_bytes
    moved = places + (sent + received) * row
    if operation == "dispatch_cached":
        return moved
    # The exchange of counts turns flags into places; ids, weights and indices travel too.
    side = choice + shape.topk * WEIGHT_BYTES
    moved += flags + places + sent * side + received * (side + 4)
    if operation == "dispatch_worst":
        moved += max(0, capacity - received) * choice  # -1 in the rows that nobody sent
    return moved


def busiest(per_rank: Sequence[int], devices: Sequence[int]) -> int:
    """Most bytes on one device; `devices` tells each rank's."""
    totals: dict[int, int] = {}
    for device, count in zip(devices, per_rank, strict=True):
        totals[device] = totals.get(device, 0) + count
    return max(totals.values())
