"""Problems that users of such libraries reported, each as they met it. The ranks are threads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepep import Buffer, CapacityError, UnsupportedConfigError, reference, registry, topology
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import Case, inputs
from tests.distributed.checks import expect


@pytest.mark.parametrize("hidden", [3584, 5120, 7176])
def test_a_hidden_size_without_a_variant_of_its_own_is_served_by_a_generic_one(hidden: int) -> None:
    """D02: chosen when the Buffer is made, never a wrong variant."""
    expected = expect(Case("generic", (5, 0, 3, 8), hidden, 8, 2))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, hidden=hidden, dtype=torch.bfloat16, timeout=20) as buffer:
            (reason,) = buffer.chosen_variants()
            assert "_hany_bf16_" in reason and f"_h{hidden}_bf16_r4 is not built" in reason
            checks.round_trip(buffer, expected)

    run_ranks(4, work)


def test_exact_variants_are_preferred_and_give_the_same_results() -> None:
    """D02: hidden 512 and 2048 on 4 ranks are built; pins make the generic one take over."""
    generic = "intranode_host_hany_bf16_rany"

    def work(group: ThreadGroup, name: str) -> None:
        for hidden in (512, 2048):
            expected = expect(Case("exact", (5, 0, 3, 8), hidden, 8, 2, biases=2))
            with Buffer(group, timeout=20) as buffer:
                checks.round_trip(buffer, expected)
                assert buffer.chosen_variants()[0].startswith(name.format(hidden))

    run_ranks(4, work, "intranode_host_h{}_bf16_r4: exact match")
    registry.pin(generic)
    try:
        run_ranks(4, work, generic)
    finally:
        registry.unpin()


@pytest.mark.parametrize("hidden", [4, 7])
def test_rows_that_are_no_multiple_of_16_bytes_are_refused_in_numbers(hidden: int) -> None:
    """D03: when the Buffer is made with the size, and when dispatch first sees it."""
    with pytest.raises(UnsupportedConfigError, match=f"rows of {hidden * 2} bytes.*multiple of 16"):
        Buffer(hidden=hidden, dtype=torch.bfloat16)
    with Buffer() as buffer:
        ids = torch.zeros((2, 1), dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        x = torch.zeros((2, hidden), dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=f"rows of {hidden * 2} bytes.*multiple of 16.*to 8"):
            buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)


def test_a_world_of_one_rank_returns_what_it_was_given() -> None:
    """D06: no group, 16 tokens, hidden 256, 8 experts, top-2 with weights that sum to 1."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn((16, 256), generator=g).to(torch.bfloat16)
    ids = torch.rand((16, 8), generator=g).topk(2).indices
    weights = torch.rand((16, 2), generator=g).softmax(1)
    with Buffer() as buffer:
        assert (buffer.rank, buffer.group_size) == (0, 1)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 8)
        recv_x, recv_ids, recv_weights, counts, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, ids, weights
        )
        assert isinstance(recv_x, torch.Tensor) and recv_weights is not None
        assert recv_ids is not None and torch.equal(recv_ids, ids)
        assert counts == torch.bincount(ids.flatten(), minlength=8).tolist()
        outputs = (recv_x.float() * recv_weights.sum(1, keepdim=True)).to(torch.bfloat16)
        combined, combined_weights, _ = buffer.combine(outputs, handle, recv_weights)
    torch.testing.assert_close(combined, x, rtol=2**-8, atol=0)
    assert combined_weights is not None and torch.equal(combined_weights, weights)


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_idle_ranks_get_empty_results_and_zeros(num_ranks: int) -> None:
    """D07: rank 0 has no tokens; rank 1 has 8 tokens and no expert for any."""
    tokens = (0, 8) + (6,) * (num_ranks - 2)
    case = Case("idle", tokens, 64, 2 * num_ranks, 2)
    made = inputs(case)
    made[1].topk_idx.fill_(-1)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=30) as buffer:
            rank, mine = buffer.rank, made[buffer.rank]
            want = reference.layout_reference(mine.topk_idx, num_ranks, 2 * num_ranks)
            layout = buffer.get_dispatch_layout(mine.topk_idx, 2 * num_ranks)
            checks.check_layout(layout, want)
            if rank < 2:
                assert int(layout[0].sum()) == int(layout[2].sum()) == 0
            x, ids, _, counts, handle, _ = buffer.dispatch(
                mine.x,
                None,
                layout[0],
                None,
                layout[3],
                layout[2],
                mine.topk_idx,
                mine.topk_weights,
            )
            assert isinstance(x, torch.Tensor) and ids is not None and counts is not None
            assert sum(counts) == int((ids >= 0).sum())
            combined, _, _ = buffer.combine(x, handle)
            assert combined.shape == (tokens[rank], 64)
            if rank == 1:
                checks.same_bits("combined", combined, torch.zeros((8, 64), dtype=torch.bfloat16))

    run_ranks(num_ranks, work)


def test_int32_and_int64_ids_give_the_same_results_and_other_types_are_named() -> None:
    """D09: without another build; a Buffer may see both."""
    case = Case("width", (5, 9, 0), 64, 6, 2, "holes")
    accepted = r"topk_idx.*must be torch\.int64 or torch\.int32"
    wide, narrow = expect(case), expect(replace(case, ids=torch.int32))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for _ in range(2):
                checks.round_trip(buffer, wide)
                checks.round_trip(buffer, narrow)
            for dtype in (torch.uint8, torch.int16, torch.float32):
                with pytest.raises(TypeError, match=accepted):
                    buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=dtype), 6)
                with pytest.raises(TypeError, match=accepted):
                    ids = wide.inputs[buffer.rank].topk_idx.to(dtype)
                    checks.dispatch(buffer, wide, topk_idx=ids)
            checks.round_trip(buffer, wide)

    run_ranks(3, work)


@pytest.mark.parametrize(
    "tokens", [(1, 1), (3, 3), (31, 31), (33, 33), (127, 127), (4095, 4095), (4095, 4096)], ids=str
)
def test_odd_token_counts(tokens: tuple[int, int]) -> None:
    """D10: up to one token fewer than the other rank."""
    expected = expect(Case("odd", tokens, 64, 8, 2))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=30) as buffer:
            checks.round_trip(buffer, expected)

    run_ranks(2, work)


@pytest.mark.parametrize("place", range(8))
def test_sums_are_made_in_fp32_and_rounded_once(place: int) -> None:
    """D13: 256 and seven times 1 is 263, in BF16 264; whichever rank holds the 256."""
    ids = torch.arange(8).view(1, 8)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            value = 256.0 if buffer.rank == place else 1.0
            layout = buffer.get_dispatch_layout(ids, 8)
            x = torch.zeros((1, 8), dtype=torch.bfloat16)
            recv, _, _, _, handle, _ = buffer.dispatch(
                x, None, layout[0], None, layout[3], layout[2]
            )
            assert isinstance(recv, torch.Tensor)
            combined, _, _ = buffer.combine(torch.full_like(recv, value), handle)
            assert combined.tolist() == [[264.0] * 8]

    run_ranks(8, work)


def test_a_call_over_capacity_is_refused_and_the_next_one_works() -> None:
    """D16: 129 tokens, then 128, with a limit of 128; the other rank is not left waiting."""
    fits, over = expect(Case("fits", (128, 5), 64)), expect(Case("over", (129, 5), 64))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20, max_tokens_per_rank=128) as buffer:
            if buffer.rank == 0:
                with pytest.raises(CapacityError, match=r"129 tokens.*max_tokens_per_rank=128"):
                    checks.dispatch(buffer, over)
            handle = checks.round_trip(buffer, fits)
            if buffer.rank == 0:
                x: Any = over.inputs[0].x
                with pytest.raises(CapacityError, match=r"129 tokens.*max_tokens_per_rank=128"):
                    buffer.dispatch(x, handle=handle)
            checks.round_trip(buffer, fits)

    run_ranks(2, work)


def test_limits_and_arithmetic_are_those_of_the_native_code() -> None:
    """D18: Python's constants equal the compiled ones."""
    from deepep import _runtime, arguments, manifest

    assert topology.MAX_RANKS_PER_DOMAIN == _runtime.MAX_RANKS
    assert arguments.MAX_TOPK == _runtime.MAX_TOPK
    assert manifest.ABI_VERSION == _runtime.ABI_VERSION
