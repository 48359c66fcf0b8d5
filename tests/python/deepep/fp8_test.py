"""FP8 cast: scales of zero and tiny blocks, error bounds, and the layout contract of scales."""

import pytest
import torch
from deepep.fp8 import (
    AMAX_FLOOR,
    num_scale_groups,
    pack_ue8m0,
    per_token_cast_back,
    per_token_cast_to_fp8,
    scale_layout,
    unpack_ue8m0,
)


@pytest.mark.parametrize(
    ("hidden", "groups", "tail"),
    [(7168, 56, 128), (3584, 28, 128), (3072, 24, 128), (2880, 23, 64), (8, 1, 8), (128, 1, 128)],
)
def test_scale_layout_is_what_the_cast_produces(hidden: int, groups: int, tail: int) -> None:
    # D15
    layout = scale_layout(5, hidden)
    assert (layout.num_groups, layout.tail) == (groups, tail)
    data, scales = per_token_cast_to_fp8(torch.randn(5, hidden, dtype=torch.bfloat16))
    assert data.shape == (5, hidden)
    assert data.dtype == torch.float8_e4m3fn
    assert tuple(scales.shape) == layout.shape == (5, groups)
    assert scales.stride() == layout.stride
    assert str(scales.dtype) == f"torch.{layout.dtype}"


def test_packed_scales_hold_four_exponents_a_word() -> None:
    # D15
    layout = scale_layout(3, 2880, "ue8m0")
    assert (layout.shape, layout.stride, layout.dtype) == ((3, 6), (6, 1), "int32")
    _, scales = per_token_cast_to_fp8(torch.randn(3, 2880), round_scale=True)
    packed = pack_ue8m0(scales)
    assert tuple(packed.shape) == layout.shape
    assert packed.dtype == torch.int32
    assert torch.equal(unpack_ue8m0(packed, 23), scales)
    word = int(packed[0, 0])
    for byte in range(4):
        exponent = word >> 8 * byte & 0xFF
        assert 2.0 ** (exponent - 127) == scales[0, byte].item()
    # The 24th byte has no group.
    assert int(packed[0, 5]) >> 24 & 0xFF == 0


def test_column_major_layout_has_the_token_fastest() -> None:
    layout = scale_layout(7, 512, column_major=True)
    assert (layout.shape, layout.stride) == ((7, 4), (1, 7))


@pytest.mark.parametrize(
    ("tokens", "hidden", "scale_format"), [(-1, 8, "float32"), (1, 0, "float32"), (1, 8, "e8m0")]
)
def test_impossible_layouts_are_refused(tokens: int, hidden: int, scale_format: str) -> None:
    with pytest.raises(ValueError):
        scale_layout(tokens, hidden, scale_format)  # type: ignore[arg-type]
    assert num_scale_groups(129) == 2


def awkward_rows() -> torch.Tensor:
    """Zeros; a block of zeros in a normal row; tiny values; one huge value; a mixed row."""
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1, 128:256] = 0
    x[2] = 1e-30
    x[3, 128:256] = 0.01
    x[3, 130] = 3e4
    return x


@pytest.mark.parametrize("round_scale", [False, True])
def test_zero_and_tiny_blocks_give_finite_scales_and_exact_zeros(round_scale: bool) -> None:
    # D14
    x = awkward_rows()
    data, scales = per_token_cast_to_fp8(x, round_scale)
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
    back = per_token_cast_back(data, scales).float()
    assert torch.isfinite(back).all()
    assert (back[0] == 0).all()
    assert (back[1, 128:256] == 0).all()
    assert (scales >= torch.tensor(AMAX_FLOOR / 448) * 0.999).all()


@pytest.mark.parametrize("round_scale", [False, True])
def test_error_stays_within_the_documented_bound(round_scale: bool) -> None:
    # D14; the division in FP32 and the rounding of the result to BF16 cost a little more.
    x = awkward_rows()
    data, scales = per_token_cast_to_fp8(x, round_scale)
    exact = data.float().view(5, 4, 128) * scales.unsqueeze(2)
    error = (exact - x.view(5, 4, 128)).abs()
    bound = torch.maximum(x.view(5, 4, 128).abs() / 16, scales.unsqueeze(2) * 2.0**-10)
    assert (error <= bound * 1.0001).all()


def test_scales_follow_the_formula_to_the_bit() -> None:
    x = torch.zeros(1, 128)
    x[0, 3] = -3.0
    data, scales = per_token_cast_to_fp8(x)
    assert scales[0, 0] == torch.tensor(3.0) * torch.tensor(1 / 448.0)
    assert data[0, 3].float() == -448
    data, scales = per_token_cast_to_fp8(x, round_scale=True)
    # 3 / 448 = 0.0067 lies between 2^-8 and 2^-7.
    assert scales[0, 0] == 2.0**-7
    assert data[0, 3].float() == -384


def test_a_power_of_two_ratio_is_not_rounded_up() -> None:
    x = torch.zeros(1, 128)
    x[0, 0] = 448.0
    _, scales = per_token_cast_to_fp8(x, round_scale=True)
    assert scales[0, 0] in (1.0, 2.0)
    assert scales[0, 0] == (1.0 if torch.tensor(448.0) * torch.tensor(1 / 448.0) <= 1 else 2.0)


def test_the_short_last_group_is_scaled_by_itself() -> None:
    x = torch.ones(2, 2880)
    x[:, 2816:] = 1000.0
    data, scales = per_token_cast_to_fp8(x)
    assert (scales[:, :22] < 0.01).all()
    assert (scales[:, 22] > 2).all()
    assert torch.allclose(per_token_cast_back(data, scales).float(), x, rtol=0.01)


def test_cast_back_takes_any_strides_and_packed_scales() -> None:
    x = torch.randn(6, 640)
    data, scales = per_token_cast_to_fp8(x, round_scale=True)
    expected = per_token_cast_back(data, scales)
    column_major = scales.t().contiguous().t()
    assert column_major.stride() == scale_layout(6, 640, column_major=True).stride
    assert torch.equal(per_token_cast_back(data, column_major), expected)
    assert torch.equal(per_token_cast_back(data, pack_ue8m0(scales)), expected)


def test_no_tokens_are_an_ordinary_input() -> None:
    data, scales = per_token_cast_to_fp8(torch.zeros(0, 256, dtype=torch.bfloat16))
    assert (data.shape, scales.shape) == ((0, 256), (0, 2))
    assert per_token_cast_back(data, scales).shape == (0, 256)


def test_wrong_scale_shapes_are_refused_in_words() -> None:
    data, scales = per_token_cast_to_fp8(torch.randn(2, 256))
    with pytest.raises(ValueError, match=r"\(2, 1\).*needs \(2, 2\)"):
        per_token_cast_back(data, scales[:, :1])
    with pytest.raises(ValueError, match="tokens, hidden"):
        per_token_cast_to_fp8(torch.randn(256))
