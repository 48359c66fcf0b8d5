"""Checks of what users pass to a Buffer: every refusal says what, value, rule and cure.

All checks come before anything is sent, so a refused call leaves the peers merely waiting, and a
corrected call may follow on the same Buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepep.errors import CapacityError
from deepep.topology import ROW_ALIGNMENT_BYTES, PayloadType

MAX_TOPK = 32
"""DEEPEP_MAX_TOPK of the ABI."""

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def tensors_of(payload: Payload) -> tuple[torch.Tensor, ...]:
    """The one or two tensors of a payload."""
    return payload if isinstance(payload, tuple) else (payload,)


def shape_of(tensor: torch.Tensor) -> str:
    """'[3, 512] torch.bfloat16', for messages."""
    return f"{list(tensor.shape)} {tensor.dtype}"


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> torch.Tensor:
    """Returns `tensor` if it has this shape (None: any size), one of these dtypes and this device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__qualname__}, but must be a torch.Tensor.")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{name} is {shape_of(tensor)}, but its dtype must be {accepted}; "
            f"convert it with {name}.to({dtypes[0]})."
        )
    have = tensor.shape
    if have != shape and not _fits(have, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} is {shape_of(tensor)}, but its shape must be [{wanted}].")
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but this Buffer works on {device}; move it with "
            f"{name}.to({str(device)!r}), or make the Buffer with device={str(tensor.device)!r}."
        )
    return tensor


def _fits(have: Sequence[int], shape: tuple[int | None, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, want in zip(have, shape, strict=True):
        if want is not None and want != size:
            return False
    return True


def check_rows(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """check_tensor for a contiguous [rows, hidden] tensor; rows are copied in 16-byte words."""
    rows = check_tensor(name, tensor, (None, None), dtypes, device)
    if not rows.is_contiguous():
        raise ValueError(
            f"{name} is {shape_of(rows)} with strides {list(rows.stride())}, but rows must be "
            f"contiguous; pass {name}.contiguous()."
        )
    row_bytes = rows.shape[1] * rows.element_size()
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT_BYTES:
        step = ROW_ALIGNMENT_BYTES // rows.element_size()
        raise ValueError(
            f"{name} is {shape_of(rows)}, which makes rows of {row_bytes} bytes, but a row must be "
            f"a positive multiple of {ROW_ALIGNMENT_BYTES} bytes; pad hidden to "
            f"{max(step, -(-rows.shape[1] // step) * step)}."
        )
    return rows


class Rows(NamedTuple):
    """A checked payload: rows [T, hidden] and, for 1-byte elements, scales [T, num_scales]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    num_tokens: int
    hidden: int
    num_scales: int
    dtype_name: PayloadType


_BYTE_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
_BF16 = (torch.bfloat16,)
_SCALE_TYPES = (torch.float32, torch.int32)  # int32: four UE8M0 exponents each
_MAX_SCALES = (1 << 14) - 1


def payload_type(dtype: torch.dtype | None) -> PayloadType:
    """The payload in a variant's name for rows of this type; None is BF16. Raises TypeError."""
    if dtype is None or dtype is torch.bfloat16:
        return "bf16"
    if dtype in _BYTE_TYPES:
        return "fp8"
    raise TypeError(
        f"dtype is {dtype}, but rows are torch.bfloat16, or FP8 ({_BYTE_TYPES[0]} and the like)."
    )


def check_payload(x: object, device: torch.device) -> Rows:
    """A BF16 tensor [T, hidden], or a tuple of FP8 rows [T, hidden] and 4-byte scales [T, ns]."""
    if not isinstance(x, tuple):
        if isinstance(x, torch.Tensor) and x.element_size() == 1:
            raise TypeError(
                f"x is {shape_of(x)} without scales; pass FP8 as a tuple (data, scales) with one "
                "scale per 128 elements, see deepep.fp8.per_token_cast_to_fp8."
            )
        rows = check_rows("x", x, _BF16, device)
        num_tokens, hidden = rows.shape
        return Rows(rows, None, num_tokens, hidden, 0, "bf16")
    if len(x) != 2:
        raise TypeError(f"x is a tuple of {len(x)}, but must be (data, scales).")
    data = check_rows("x[0]", x[0], _BYTE_TYPES, device)
    num_tokens, hidden = data.shape
    scales = check_tensor("x[1]", x[1], (num_tokens, None), _SCALE_TYPES, device)
    num_scales = scales.shape[1]
    if not 1 <= num_scales <= _MAX_SCALES:
        raise ValueError(
            f"x[1] is {shape_of(scales)}, but there must be 1 to {_MAX_SCALES} scales a row; "
            "deepep.fp8.scale_layout tells how many a hidden size has."
        )
    return Rows(data, scales, num_tokens, hidden, num_scales, "fp8")


class Topk(NamedTuple):
    """Checked top-k tensors: ids [T, K] int32 or int64, and weights [T, K] float32 if given."""

    ids: torch.Tensor
    weights: torch.Tensor | None
    num_topk: int


def check_topk(
    topk_idx: object, topk_weights: object | None, num_tokens: int | None, device: torch.device
) -> Topk:
    """Ids are int32 or int64 in any mix between calls; -1 marks no selection."""
    ids = check_tensor("topk_idx", topk_idx, (num_tokens, None), (torch.int64, torch.int32), device)
    num_topk = ids.shape[1]
    if not 1 <= num_topk <= MAX_TOPK:
        raise ValueError(
            f"topk_idx is {shape_of(ids)}, but a token may choose 1 to {MAX_TOPK} experts."
        )
    if topk_weights is None:
        return Topk(ids.contiguous(), None, num_topk)
    weights = check_tensor("topk_weights", topk_weights, ids.shape, (torch.float32,), device)
    return Topk(ids.contiguous(), weights.contiguous(), num_topk)


def check_bias(
    bias: object, shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """None, one BF16 tensor [T, hidden], or a tuple of two."""
    if bias is None:
        return None, None
    given = bias if isinstance(bias, tuple) else (bias,)
    if not 1 <= len(given) <= 2:
        raise ValueError(f"bias is a tuple of {len(given)}, but must be one tensor or two.")
    checked: list[torch.Tensor | None] = [
        check_tensor(f"bias[{i}]", item, shape, (torch.bfloat16,), device).contiguous()
        for i, item in enumerate(given)
    ]
    return checked[0], checked[1] if len(checked) == 2 else None


def check_capacity(num_tokens: int, max_tokens_per_rank: int | None) -> None:
    """Raises CapacityError when a call has more tokens than the Buffer was made for."""
    if max_tokens_per_rank is not None and num_tokens > max_tokens_per_rank:
        raise CapacityError(
            f"x has {num_tokens} tokens, but this Buffer was made with max_tokens_per_rank="
            f"{max_tokens_per_rank}; send at most that many, or make the Buffer with more. Nothing "
            "was sent: a corrected call may follow."
        )


def check_event_arguments(
    previous_event: object | None, async_finish: bool, allocate_on_comm_stream: bool
) -> None:
    """V1's rule: who allocates on the communication stream must order it on both sides."""
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise ValueError(
            f"allocate_on_comm_stream=True with previous_event={previous_event} and async_finish="
            f"{async_finish}; it needs a previous_event and async_finish=True, since otherwise the "
            "output would be allocated on a stream that the caller does not wait for."
        )
