"""Counts the bytes of low-latency operations; what tools/bench/traffic.py is for the others."""

from __future__ import annotations

import torch
from deepep import topology

from tools.bench.shapes import Shape
from tools.bench.traffic import INDEX_BYTES, WEIGHT_BYTES, Flow

SOURCE_BYTES = 8
"""Beside each received row: whose it is."""

MESSAGE_HEAD_BYTES = 16
"""In front of a row in a workspace."""


def selections(shape: Shape, ids: torch.Tensor) -> tuple[list[int], int]:
    """Selections of this rank's tokens that go to each rank, and tokens that have any."""
    counts = torch.bincount(ids[ids >= 0].flatten().cpu(), minlength=shape.experts)
    experts = [topology.expert_range(shape.experts, shape.ranks, r) for r in range(shape.ranks)]
    rows = [int(counts[part.start : part.stop].sum()) for part in experts]
    return rows, int((ids >= 0).any(dim=1).sum())


def v1_bytes(operation: str, shape: Shape, flow: Flow) -> list[int]:
    """By rank: payload and scales (combine: BF16 rows) of its tokens' selections."""
    row = 2 * shape.hidden
    if operation.startswith("dispatch"):
        row = shape.payload_bytes + shape.scale_bytes
    return [sum(rows) * row for rows in flow.rows]


def memory_bytes(operation: str, shape: Shape, flow: Flow) -> list[int]:
    """Bytes read plus bytes written in each rank's own memory, every input read once.

    Rows that cross a workspace are written to it and read from it. Cells are not counted.
    """
    return [_of_rank(operation, shape, flow, rank) for rank in range(shape.ranks)]


def _of_rank(operation: str, shape: Shape, flow: Flow, rank: int) -> int:
    received, mine, tokens = flow.received[rank], sum(flow.rows[rank]), shape.tokens
    token = 2 * shape.hidden  # BF16: what dispatch reads and combine sums
    row = shape.payload_bytes + shape.scale_bytes
    message = MESSAGE_HEAD_BYTES + shape.payload_bytes + -(-shape.scale_bytes // 16) * 16
    ids = tokens * shape.topk * INDEX_BYTES
    choices = ids + tokens * shape.topk * WEIGHT_BYTES
    parts = {
        "dispatch": ids + flow.sent[rank] * token + received * (row + SOURCE_BYTES),
        "dispatch_send": ids + flow.sent[rank] * token + received * message,
        "dispatch_receive": received * (message + row + SOURCE_BYTES),
        "combine_pool": choices + (received + tokens) * token,
        "combine_send": received * (token + SOURCE_BYTES) + mine * token,
        "combine_receive": choices + (mine + tokens) * token,
    }
    parts["combine_zero_copy"] = parts["combine_pool"]
    parts["combine_any"] = parts["combine_send"] + parts["combine_receive"]
    return parts[operation]
