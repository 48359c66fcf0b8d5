"""FP8 payloads in plain torch: quantise, dequantise, and the contract of the scale tensors.

One scale covers 128 neighbouring elements of a row. The number of groups is ceil(hidden / 128):
when 128 does not divide the hidden size the last group is short (2880 elements: 23 groups, the last
one with 64). The bits equal those of the fused cast in the kernels.

scale_layout() needs no torch; the other functions import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

GROUP_SIZE = 128
"""Elements that share a scale."""

AMAX_FLOOR = 1e-4
"""A group's largest magnitude is taken as at least this, so that no scale is zero."""

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

ScaleFormat = Literal["float32", "ue8m0"]


def num_scale_groups(hidden: int) -> int:
    """Scales of a row of `hidden` elements. Raises ValueError for hidden below 1."""
    if hidden < 1:
        raise ValueError(f"hidden={hidden}: a row has at least 1 element.")
    return -(-hidden // GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """How a scale tensor lies in memory.

    Attributes:
        shape: (tokens, 4-byte words per row).
        stride: in words.
        dtype: "float32", or "int32" for packed UE8M0.
        num_groups: scales of a row.
        tail: elements of the last group, 1..128.
    """

    shape: tuple[int, int]
    stride: tuple[int, int]
    dtype: str
    num_groups: int
    tail: int


def scale_layout(
    num_tokens: int,
    hidden: int,
    scale_format: ScaleFormat = "float32",
    column_major: bool = False,
) -> ScaleLayout:
    """Shape, strides and type of the scales that belong to a payload [num_tokens, hidden].

    "float32" holds one scale in a word. "ue8m0" holds four exponents in an int32: byte b of word w
    (little endian) is the exponent of group 4 w + b; absent groups of the last word are 0.

    dispatch accepts any strides and returns row-major; column_major describes the layout that
    grouped matrix products often want (the token dimension is the fastest).

    Raises:
        ValueError: a negative token count, hidden below 1, or an unknown format.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens}: must be at least 0.")
    if scale_format not in ("float32", "ue8m0"):
        raise ValueError(f"scale_format={scale_format!r}: must be 'float32' or 'ue8m0'.")
    groups = num_scale_groups(hidden)
    words = groups if scale_format == "float32" else -(-groups // 4)
    return ScaleLayout(
        shape=(num_tokens, words),
        stride=(1, num_tokens) if column_major else (words, 1),
        dtype="float32" if scale_format == "float32" else "int32",
        num_groups=groups,
        tail=hidden - (groups - 1) * GROUP_SIZE,
    )


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """[T, H] of any type -> float32 [T, groups, 128], the tail padded with zeros."""
    import torch

    tokens, hidden = x.shape
    groups = num_scale_groups(hidden)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP_SIZE - hidden))
    return padded.view(tokens, groups, GROUP_SIZE)


def _next_power_of_two(value: torch.Tensor) -> torch.Tensor:
    """Smallest power of two that is at least `value` (positive, normal float32), from its bits."""
    import torch

    bits = value.contiguous().view(torch.int32)
    exponent = (bits >> 23 & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def per_token_cast_to_fp8(
    x: torch.Tensor, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows, one scale per 128 elements.

    With amax = max(1e-4, largest magnitude of the group), in FP32: the stored scale is
    amax * (1 / 448) and elements are multiplied by 448 / amax; with `round_scale` the stored scale
    is the next power of two and elements are divided by it. Values saturate to finite e4m3.

    An element's error is at most 1/16 of its magnitude, or 2^-10 of the scale if that is larger
    (for groups whose amax is below the floor the scale is that of the floor). Zeros stay exactly
    zero.

    Args:
        x: [T, H] BF16 or FP32, finite.
        round_scale: powers of two as scales, which UE8M0 can hold.

    Returns:
        float8_e4m3fn [T, H], and float32 scales [T, ceil(H / 128)]: value = element * scale.
    """
    import torch

    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [tokens, hidden].")
    hidden = x.shape[1]
    grouped = _grouped(x)
    amax = grouped.abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    scales = amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=x.device)
    factor = torch.full_like(amax, E4M3_MAX) / amax  # a number / a tensor would round twice
    if round_scale:
        scales = _next_power_of_two(scales)
        factor = 1.0 / scales
    scaled = (grouped * factor.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX)
    data = scaled.flatten(1)[:, :hidden].to(torch.float8_e4m3fn)
    return data.contiguous(), scales


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Packs power-of-two scales: float32 [T, G] -> int32 [T, ceil(G / 4)], see scale_layout."""
    import torch

    tokens, groups = scales.shape
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -groups % 4))
    return padded.contiguous().view(torch.int32).view(tokens, -(-groups // 4))


def unpack_ue8m0(packed: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Inverse of pack_ue8m0: int32 [T, ceil(G / 4)] -> float32 [T, num_groups]."""
    import torch

    # A copy: one word a row may have any stride and still count as contiguous.
    flat = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    exponents = flat.view(packed.shape[0], -1)[:, :num_groups].to(torch.int32)
    return (exponents << 23).view(torch.float32)


def per_token_cast_back(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantises: float8_e4m3fn [T, H] with float32 or packed int32 scales -> BF16 [T, H].

    The product is made in FP32 and rounded once. Scales may have any strides.
    """
    import torch

    tokens, hidden = data.shape
    groups = num_scale_groups(hidden)
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, groups)
    if tuple(scales.shape) != (tokens, groups):
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}; data [{tokens}, {hidden}] needs "
            f"({tokens}, {groups}): one scale per {GROUP_SIZE} elements, the last group may be "
            "short. scale_layout() has the rule."
        )
    values = _grouped(data) * scales.float().unsqueeze(2)
    return values.flatten(1)[:, :hidden].to(torch.bfloat16)
