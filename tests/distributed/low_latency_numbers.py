"""BF16 numbers to be cast to FP8 by a low-latency dispatch, and the check of their bytes."""

from __future__ import annotations

import torch
from deepep import Buffer, fp8

from tests.distributed.low_latency_cases import bits, on

ORDERS = ("by size", "mixed", "within 2^12")
CASTS = {"fp8": (False, False), "rounded": (True, False), "ue8m0": (True, True)}


def cast_on(buffer: Buffer, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What one rank sends itself: rows and scales as received, on the CPU."""
    round_scale, ue8m0 = CASTS[name]
    tokens = len(x)
    (data, scales), count, *_ = buffer.low_latency_dispatch(
        on(buffer, x),
        on(buffer, torch.zeros((tokens, 1), dtype=torch.int64)),
        tokens,
        1,
        round_scale=round_scale,
        use_ue8m0=ue8m0,
    )
    assert count.tolist() == [tokens]
    return data[0].cpu(), scales[0].cpu()


def check_bits(data: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, name: str) -> None:
    """Rows and scales against deepep.fp8."""
    wanted, wanted_scales = fp8.per_token_cast_to_fp8(x, round_scale=CASTS[name][0])
    if name == "ue8m0":
        wanted_scales = fp8.pack_ue8m0(wanted_scales)
    assert torch.equal(bits(data), bits(wanted))
    assert torch.equal(bits(scales), bits(wanted_scales))


def finite_numbers() -> torch.Tensor:
    """All 65280 finite BF16 numbers, ascending by bits, as rows of 255 groups."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return every[every.isfinite()].view(2, -1)


def numbers_in(order: str) -> torch.Tensor:
    """Rows of them. By size a group is of like numbers; mixed, most are tiny beside its largest;
    within 2^12, every group has normal and subnormal results, ties and saturation."""
    x = finite_numbers()
    if order == "mixed":
        x = x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))]
        x = x.view(2, -1)
    if order == "within 2^12":
        x = x.flatten()
        x = x[(x.abs() >= 2**-6) & (x.abs() <= 2**6)]
        random = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))
        x = x[random[: x.numel() // 512 * 512]].view(4, -1)
    return x
