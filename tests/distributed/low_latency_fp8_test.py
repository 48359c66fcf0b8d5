"""FP8 of the low-latency dispatch: every BF16 number, extreme blocks (D14), scale layouts (D15)."""

from __future__ import annotations

import pytest
import torch
from deepep import Buffer, fp8

from tests.distributed.low_latency_numbers import CASTS, ORDERS, cast_on, check_bits, numbers_in


def cast(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with Buffer(None, 0, 0, low_latency_mode=True, device="cpu") as buffer:
        data, scales = cast_on(buffer, x, name)
        return data.clone(), scales.clone()


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_finite_number_has_the_bits_of_the_definition(name: str, order: str) -> None:
    x = numbers_in(order)
    check_bits(*cast(x, name), x, name)


@pytest.mark.parametrize("name", CASTS)
def test_zero_and_tiny_blocks_stay_finite_and_zeros_stay_zero(name: str) -> None:
    """D14: a token of zeros; a block of zeros in a normal token; 1e-30; one 3e4."""
    x = torch.randn((4, 512), generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0] = 0
    x[1, 128:256] = 0
    x[2, 256:384] = 1e-30
    x[3, 400] = 3e4
    data, scales = cast(x, name)
    as_float = fp8.unpack_ue8m0(scales, 4) if name == "ue8m0" else scales
    assert bool(as_float.isfinite().all()) and bool((as_float > 0).all())
    back = fp8.per_token_cast_back(data, scales)
    assert bool(back.isfinite().all())
    assert bool((back[x == 0] == 0).all())
    error = (back.float() - x.float()).abs()
    step = as_float.repeat_interleave(128, dim=1) * 2**-10  # see fp8.per_token_cast_to_fp8
    assert bool((error <= torch.maximum(x.float().abs() / 16, step) * 1.01).all())


@pytest.mark.parametrize("hidden, groups", [(7168, 56), (3584, 28), (3072, 24), (2880, 23)])
@pytest.mark.parametrize("name", ["fp8", "ue8m0"])
def test_scales_lie_as_the_documented_function_says(name: str, hidden: int, groups: int) -> None:
    """D15: of each expert, column-major; the last group of 2880 elements has 64."""
    with Buffer(None, 0, 0, low_latency_mode=True, device="cpu") as buffer:
        round_scale, ue8m0 = CASTS[name]
        (_, scales), *_ = buffer.low_latency_dispatch(
            torch.ones((5, hidden)).bfloat16(), torch.zeros((5, 1), dtype=torch.int64), 8, 3,
            round_scale=round_scale, use_ue8m0=ue8m0,
        )  # fmt: skip
        layout = fp8.scale_layout(8, hidden, "ue8m0" if ue8m0 else "float32", column_major=True)
        assert layout.num_groups == groups and layout.tail == (64 if hidden == 2880 else 128)
        assert tuple(scales.shape) == (3, *layout.shape)
        assert scales.stride() == (8 * layout.shape[1], *layout.stride)
        assert scales.dtype == (torch.int32 if ue8m0 else torch.float32)
