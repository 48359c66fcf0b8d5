"""The tensors that a dispatch receives into, and the words for it when there is no memory."""

from __future__ import annotations

from typing import Any

import torch

from deepep import sizes
from deepep.arguments import Payload, Rows, Topk
from deepep.blocks import Memory
from deepep.engine import Engine
from deepep.errors import CapacityError

_cuda: Any = torch.cuda
OUT_OF_MEMORY: tuple[type[Exception], ...] = (MemoryError, _cuda.OutOfMemoryError)


def for_payload(engine: Engine, rows: Rows, capacity: int) -> Memory:
    """Memory for received rows and, where there are some, their scales. Raises CapacityError."""
    x = ((capacity, rows.hidden), rows.x.dtype)
    try:
        if rows.scales is None:
            return engine.piece(x)
        return engine.piece(x, ((capacity, rows.num_scales), rows.scales.dtype))
    except OUT_OF_MEMORY as error:
        raise too_little(engine, rows, None, capacity) from error


def for_all(engine: Engine, rows: Rows, topk: Topk | None, capacity: int) -> tuple[Memory, Memory]:
    """Memory for the payload, and for what comes beside it: indices, and ids and weights where
    these travel. Raises CapacityError.

    The second is not in the piece of the first: a handle keeps the indices, which must not keep the
    rows.
    """
    payload = for_payload(engine, rows, capacity)
    src_idx = ((capacity,), torch.int32)
    try:
        if topk is None:
            return payload, engine.piece(src_idx)
        shape = (capacity, topk.num_topk)
        side = engine.piece(src_idx, (shape, topk.ids.dtype), (shape, torch.float32))
    except OUT_OF_MEMORY as error:
        raise too_little(engine, rows, topk, capacity) from error
    return payload, side


def as_given(payload: Memory) -> Payload:
    """The payload in the form in which it was passed to dispatch."""
    x, *scales = payload.tensors()
    return (x, scales[0]) if scales else x


def too_little(engine: Engine, rows: Rows, topk: Topk | None, capacity: int) -> CapacityError:
    """What the receive tensors need, what there is, and what would fit."""
    shape = (
        rows.hidden,
        rows.x.element_size(),
        rows.num_scales,
        topk.num_topk if topk else 0,
        topk.ids.element_size() if topk else 8,
    )
    need, row = (sizes.receive_layout(count, *shape).total for count in (capacity, 1))
    free = engine.free_bytes()
    tokens = sizes.largest_tokens_per_rank(free, engine.num_ranks, *shape)
    return CapacityError(
        f"There is no memory for the receive tensors: {capacity} rows of {row} bytes are {need} "
        f"bytes, and about {free} are free on {engine.device}. {free // row} rows fit, which "
        f"{tokens} tokens on each of {engine.num_ranks} ranks cannot exceed. Send fewer tokens at "
        "a time, free memory, or use more ranks."
    )
