"""The reference itself, against hand-made cases and independent formulas."""

import pytest
import torch
from deepep.fp8 import per_token_cast_to_fp8
from deepep.reference import combine_reference, dispatch_reference, layout_reference
from deepep.topology import expert_owner, expert_range
from hypothesis import given, settings
from hypothesis import strategies as st


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)


def routing(
    num_tokens: list[int], num_experts: int, num_topk: int, seed: int
) -> list[torch.Tensor]:
    """Random distinct experts, about one selection in five missing."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for tokens in num_tokens:
        scores = torch.rand(tokens, num_experts, generator=generator)
        chosen = scores.topk(num_topk, dim=1).indices
        missing = torch.rand(tokens, num_topk, generator=generator) < 0.2
        result.append(torch.where(missing, -1, chosen))
    return result


def test_dispatch_of_a_case_worked_out_by_hand() -> None:
    # 2 ranks, 4 experts: rank 0 owns 0 and 1.
    xs = [torch.full((3, 8), 1.0), torch.full((2, 8), 2.0)]
    xs[0][1] = 1.5
    topk = [ids([0, 1], [3, 0], [-1, 2]), ids([2, 3], [-1, -1])]
    weights = [torch.full((3, 2), 0.5), torch.full((2, 2), 0.25)]
    on_zero, on_one = dispatch_reference([x.bfloat16() for x in xs], topk, weights, 4)

    assert on_zero.layout.num_tokens_per_rank.tolist() == [2, 2]
    assert on_zero.layout.num_tokens_per_expert.tolist() == [2, 1, 1, 1]
    assert on_zero.layout.is_token_in_rank.tolist() == [[True, False], [True, True], [False, True]]
    assert on_one.layout.num_tokens_per_rank.tolist() == [0, 1]

    assert isinstance(on_zero.recv_x, torch.Tensor)
    assert on_zero.recv_x[:, 0].tolist() == [1.0, 1.5]
    assert on_zero.recv_src_idx.tolist() == [0, 1]
    assert on_one.recv_src_idx.tolist() == [1, 2, 0]
    assert on_zero.rank_prefix_matrix.tolist() == [[2, 2], [2, 3]]
    assert on_zero.send_head.tolist() == [[0, -1], [1, 0], [-1, 1]]
    assert on_one.send_head.tolist() == [[-1, 2], [-1, -1]]

    assert on_zero.recv_topk_idx is not None and on_one.recv_topk_idx is not None
    assert on_zero.recv_topk_idx.tolist() == [[0, 1], [-1, 0]]
    assert on_one.recv_topk_idx.tolist() == [[1, -1], [-1, 0], [0, 1]]
    assert on_one.recv_topk_weights is not None
    assert on_one.recv_topk_weights.tolist() == [[0.5, 0.0], [0.0, 0.5], [0.25, 0.25]]
    assert on_zero.num_recv_tokens_per_expert.tolist() == [2, 1]
    assert on_one.num_recv_tokens_per_expert.tolist() == [2, 2]
    assert on_one.aligned_counts() == [2, 2]
    assert on_one.aligned_counts(8) == [8, 8]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 11),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_rows_counts_and_send_head_agree(
    num_tokens: list[int], num_experts: int, num_topk: int, seed: int
) -> None:
    num_topk = min(num_topk, num_experts)
    ranks = len(num_tokens)
    topk = routing(num_tokens, num_experts, num_topk, seed)
    # Every row says where it comes from.
    xs = [
        torch.tensor([[rank, token] * 4 for token in range(n)]).reshape(n, 8).bfloat16()
        for rank, n in enumerate(num_tokens)
    ]
    weights = [torch.rand(n, num_topk) for n in num_tokens]
    results = dispatch_reference(xs, topk, weights, num_experts)
    for rank, result in enumerate(results):
        rows = result.recv_x
        assert isinstance(rows, torch.Tensor)
        order = [(int(row[0]), int(row[1])) for row in rows]
        assert order == sorted(order)
        assert result.recv_src_idx.tolist() == [token for _, token in order]
        assert result.rank_prefix_matrix[-1, rank] == len(order)
        for row, (source, token) in enumerate(order):
            assert results[source].send_head[token, rank] == row
            owners = [expert_owner(e, num_experts, ranks) for e in topk[source][token] if e >= 0]
            assert rank in owners
        local = expert_range(num_experts, ranks, rank)
        assert result.recv_topk_idx is not None
        for expert in range(len(local)):
            received = (result.recv_topk_idx == expert).sum()
            assert received == result.num_recv_tokens_per_expert[expert]
    sent = sum(int((result.send_head >= 0).sum()) for result in results)
    assert sent == sum(len(result.recv_src_idx) for result in results)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 1000))
def test_combining_what_was_dispatched_multiplies_by_the_number_of_ranks(
    num_tokens: list[int], seed: int
) -> None:
    num_experts = 7
    topk = routing(num_tokens, num_experts, 3, seed)
    xs = [torch.randint(-8, 8, (n, 16)).bfloat16() for n in num_tokens]
    weights = [torch.rand(n, 3) for n in num_tokens]
    sent = dispatch_reference(xs, topk, weights, num_experts)
    received = [item.recv_x for item in sent if isinstance(item.recv_x, torch.Tensor)]
    routed = [item.recv_topk_weights for item in sent if item.recv_topk_weights is not None]
    for rank, result in enumerate(combine_reference(received, sent, routed)):
        copies = sent[rank].layout.is_token_in_rank.sum(1, keepdim=True)
        assert torch.equal(result.combined_x, (xs[rank].float() * copies).bfloat16())
        # Each selection lives on exactly one rank, so weights come back as they went.
        assert result.combined_topk_weights is not None
        expected = torch.where(topk[rank] >= 0, weights[rank], torch.zeros(()))
        assert torch.equal(result.combined_topk_weights, expected)


@pytest.mark.parametrize("big", range(8))
def test_combine_accumulates_in_fp32_and_rounds_once(big: int) -> None:
    # D13: 256 and seven times 1, whichever rank holds the 256; BF16 alone would stay at 256.
    topk = [ids(list(range(8))), *(torch.empty(0, 8, dtype=torch.int64) for _ in range(7))]
    xs = [torch.zeros(len(t), 8).bfloat16() for t in topk]
    sent = dispatch_reference(xs, topk, None, 8)
    held = [torch.full((1, 8), 256.0 if rank == big else 1.0).bfloat16() for rank in range(8)]
    combined = combine_reference(held, sent)[0].combined_x
    assert (combined == 264).all()


def test_bias_is_added_first_and_alone_for_unrouted_tokens() -> None:
    topk = [ids([0], [-1])]
    sent = dispatch_reference([torch.zeros(2, 8).bfloat16()], topk, None, 1)
    rows = [torch.full((1, 8), -1.0).bfloat16()]
    # (1 + 2^-8) + (-1) in FP32 keeps the small part, which BF16 steps in between would lose.
    biases = [[torch.full((2, 8), 1.0).bfloat16(), torch.full((2, 8), 2.0**-9).bfloat16()]]
    combined = combine_reference(rows, sent, biases=biases)[0].combined_x
    assert (combined[0] == 2.0**-9).all()
    assert (combined[1] == torch.tensor(1.0 + 2.0**-9).bfloat16()).all()
    unbiased = combine_reference(rows, sent)[0].combined_x
    assert (unbiased[1] == 0).all()


def test_fp8_rows_travel_with_their_scales_in_row_major() -> None:
    data, scales = per_token_cast_to_fp8(torch.randn(4, 256))
    column_major = scales.t().contiguous().t()
    topk = [ids([1], [0], [1], [0]), torch.empty(0, 1, dtype=torch.int64)]
    empty = per_token_cast_to_fp8(torch.zeros(0, 256))
    results = dispatch_reference([(data, column_major), empty], topk, None, 2)
    rows, row_scales = results[1].recv_x
    assert torch.equal(rows.view(torch.uint8), data.view(torch.uint8)[[0, 2]])
    assert torch.equal(row_scales, scales[[0, 2]])
    assert row_scales.is_contiguous()
    assert results[0].recv_topk_idx is None


def test_nothing_received_keeps_types_and_widths() -> None:
    nothing = torch.empty(0, 2, dtype=torch.int32)
    xs = [torch.empty(0, 8).bfloat16()] * 2
    results = dispatch_reference(xs, [nothing, nothing], [torch.empty(0, 2)] * 2, 4)
    for result in results:
        assert isinstance(result.recv_x, torch.Tensor)
        assert result.recv_x.shape == (0, 8)
        assert result.recv_topk_idx is not None
        assert result.recv_topk_idx.dtype == torch.int32
        assert result.recv_topk_idx.shape == (0, 2)
        assert result.num_recv_tokens_per_expert.tolist() == [0, 0]


def test_layout_counts_a_rank_once_and_every_selection() -> None:
    layout = layout_reference(ids([0, 1, 2], [5, -1, 4]), 2, 6)
    assert layout.num_tokens_per_rank.tolist() == [1, 1]
    assert layout.num_tokens_per_expert.tolist() == [1, 1, 1, 0, 1, 1]
