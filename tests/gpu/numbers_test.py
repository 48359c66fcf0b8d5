"""Numbers: widths that users reported, sums in FP32, FP8 blocks of zeros and of extremes."""

import torch
from deepep import fp8

from tests.distributed import checks
from tests.distributed.cases import Case
from tests.distributed.checks import expect
from tests.gpu.ranks import Rank, on_ranks

GUARD = 0x5A


@on_ranks(counts=(4,))
def test_hidden_2880_against_double_precision(rank: Rank) -> None:
    """D01: tokens 37, 0, 64, 5; 32 experts, top-4; weighted rows against sums in FP64."""
    expected = expect(Case("hidden_2880", (37, 0, 64, 5), 2880, 32, 4))
    mine = expected.inputs[rank.index]
    assert isinstance(mine.x, torch.Tensor)
    with rank.new_buffer() as buffer:
        guards = [buffer.empty(4096, dtype=torch.uint8).fill_(GUARD) for _ in range(40)]
        del guards[::2]
        checks.round_trip(buffer, expected)
        x, ids, weights, _, handle, _ = checks.dispatch(buffer, expected)
        assert isinstance(x, torch.Tensor) and ids is not None and weights is not None
        combined, _, _ = buffer.combine(
            (x.float() * weights.sum(1, keepdim=True)).to(torch.bfloat16), handle
        )
        assert combined.shape == mine.x.shape
        exact = mine.x.double() * mine.topk_weights.double().sum(1, keepdim=True)
        # Each of up to 4 summands is rounded to 8 bits, and so is their sum.
        torch.testing.assert_close(combined.cpu().double(), exact, rtol=2**-7, atol=1e-6)
        torch.cuda.synchronize()
        rank.barrier()
        assert all(bool((guard == GUARD).all()) for guard in guards)


@on_ranks(counts=(8,), choices=[str(place) for place in range(8)])
def test_sums_are_made_in_fp32_and_rounded_once(rank: Rank, place: str) -> None:
    """D13: 256 and seven times 1 is 263, in BF16 264; whichever rank holds the 256."""
    buffer = rank.buffer()
    ids = torch.arange(8, device="cuda").view(1, 8)
    layout = buffer.get_dispatch_layout(ids, 8)
    x = torch.zeros((1, 8), dtype=torch.bfloat16, device="cuda")
    recv, _, _, _, handle, _ = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2])
    assert isinstance(recv, torch.Tensor)
    value = 256.0 if rank.index == int(place) else 1.0
    combined, _, _ = buffer.combine(torch.full_like(recv, value), handle)
    assert combined.tolist() == [[264.0] * 8]


@on_ranks(counts=(2, 4))
def test_fp8_blocks_of_zeros_tiny_and_large_values(rank: Rank) -> None:
    """D14: scales are finite and positive, zeros stay zeros, through quantisation and dispatch."""
    buffer = rank.buffer()
    g = torch.Generator().manual_seed(rank.index)
    rows = torch.randn((6, 512), generator=g)
    rows[0] = 0
    rows[1, 128:256] = 0
    rows[2, :128] = 1e-30
    rows[3, 300] = 3e4
    ids = torch.arange(rank.size, device="cuda").repeat(6, 1)[:, :2].contiguous()
    for round_scale in (False, True):
        data, scales = fp8.per_token_cast_to_fp8(
            rows.to(torch.bfloat16).cuda(), round_scale=round_scale
        )
        assert bool((scales > 0).all()) and bool(scales.isfinite().all())
        layout = buffer.get_dispatch_layout(ids, rank.size)
        x, _, _, _, handle, _ = buffer.dispatch(
            (data, scales), None, layout[0], None, layout[3], layout[2]
        )
        assert isinstance(x, tuple)
        back = fp8.per_token_cast_back(*x).float()
        assert bool(back.isfinite().all())
        zero = handle.recv_src_idx == 0
        assert bool((back[zero] == 0).all())
        own = fp8.per_token_cast_back(data, scales)
        mine = fp8.per_token_cast_back(*x)[_from(handle.rank_prefix_matrix, rank)]
        assert torch.equal(mine, own[handle.recv_src_idx[_from(handle.rank_prefix_matrix, rank)]])


def _from(prefix: torch.Tensor, rank: Rank) -> slice:
    """Rows that this rank sent to itself."""
    ends = prefix[:, rank.index].tolist()
    return slice(ends[rank.index - 1] if rank.index else 0, ends[rank.index])
