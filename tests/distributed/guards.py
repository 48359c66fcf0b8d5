"""Guards around the exported memory that the next results come to lie in."""

from __future__ import annotations

import torch
from deepep import Buffer, sizes

from tests.distributed.cases import Tensors
from tests.distributed.checks import Expected

GUARD = 0x5A


def exported_bytes(expected: Expected, rank: int, rows: int) -> int:
    """Exported memory that a dispatch with `rows` rows holds; each tensor is aligned to 256."""
    case, x = expected.case, expected.inputs[rank].x
    data, scales = x if isinstance(x, tuple) else (x, None)
    layout = sizes.receive_layout(
        rows,
        case.hidden,
        data.element_size(),
        0 if scales is None else scales.shape[1],
        case.num_topk if case.with_topk else 0,
        case.ids.itemsize,
    )
    parts = (layout.x, layout.x_scales, layout.topk_idx, layout.topk_weights, layout.src_idx)
    return sum(-(-part // 256) * 256 for part in parts)


def place(buffer: Buffer, size: int) -> list[torch.Tensor]:
    """Two guards with a hole of this many bytes between them, where the next results will lie."""
    before, hole, after = (
        buffer.empty(count, dtype=torch.uint8).fill_(GUARD) for count in (1 << 16, size, 1 << 16)
    )
    assert hole.data_ptr() == before.data_ptr() + before.numel()
    assert after.data_ptr() == hole.data_ptr() + size
    return [before, after]


def check(between: list[torch.Tensor], x: Tensors | None = None) -> None:
    """That `x`, if given, lies between the guards, and that these are as they were."""
    for name, tensor in zip(("before", "after"), between, strict=True):
        wrong = (tensor != GUARD).nonzero()[:, 0]
        assert len(wrong) == 0, f"{len(wrong)} bytes {name} the results were written to"
    if x is not None:
        first = x[0] if isinstance(x, tuple) else x
        assert between[0].data_ptr() < first.data_ptr() < between[1].data_ptr(), "not guarded"
