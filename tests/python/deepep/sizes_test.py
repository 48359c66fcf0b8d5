"""Memory arithmetic of the receive tensors (D18)."""

from pathlib import Path

import pytest
from deepep.errors import CapacityError
from deepep.sizes import (
    check_budget,
    free_host_bytes,
    largest_tokens_per_rank,
    receive_layout,
    worst_case_capacity,
)
from hypothesis import given
from hypothesis import strategies as st


def test_sizes_are_exact_beyond_32_bits() -> None:
    # Hidden 7168, 64 ranks, 8192 tokens each.
    capacity = worst_case_capacity(8192, 64)
    layout = receive_layout(capacity, 7168, 2, 0, 8)
    assert capacity == 524_288
    assert layout.x == 7_516_192_768
    assert layout.topk_idx == 33_554_432
    assert layout.topk_weights == 16_777_216
    assert layout.src_idx == 2_097_152
    assert layout.total == 7_568_621_568


def test_fp8_rows_count_their_scales() -> None:
    layout = receive_layout(1000, 7168, 1, 56, 8, index_bytes=4)
    assert (layout.x, layout.x_scales, layout.topk_idx) == (7_168_000, 224_000, 32_000)


@given(
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 14),
    st.sampled_from([1, 2]),
    st.integers(0, 64),
    st.integers(0, 32),
)
def test_sizes_grow_with_every_input(
    capacity: int, hidden: int, elem_bytes: int, scales: int, topk: int
) -> None:
    total = receive_layout(capacity, hidden, elem_bytes, scales, topk).total
    assert receive_layout(capacity + 1, hidden, elem_bytes, scales, topk).total > total
    for larger in (
        receive_layout(capacity, hidden + 1, elem_bytes, scales, topk),
        receive_layout(capacity, hidden, elem_bytes, scales + 1, topk),
        receive_layout(capacity, hidden, elem_bytes, scales, topk + 1),
    ):
        assert larger.total >= total
        assert capacity == 0 or larger.total > total


@given(st.integers(0, 1 << 34), st.integers(1, 64), st.integers(1, 8192), st.integers(0, 32))
def test_largest_count_fits_and_one_more_does_not(
    budget: int, num_ranks: int, hidden: int, topk: int
) -> None:
    largest = largest_tokens_per_rank(budget, num_ranks, hidden, 2, 0, topk)
    assert check_budget(largest, budget, num_ranks, hidden, 2, 0, topk).total <= budget
    with pytest.raises(CapacityError):
        check_budget(largest + 1, budget, num_ranks, hidden, 2, 0, topk)


def test_over_budget_names_need_budget_and_largest_count() -> None:
    with pytest.raises(CapacityError) as caught:
        check_budget(2048, 4 << 30, 16, 5120 * 50, 2, 0, 8)
    text = str(caught.value)
    assert "num_tokens_per_rank=2048" in text
    assert str(4 << 30) in text
    largest = largest_tokens_per_rank(4 << 30, 16, 5120 * 50, 2, 0, 8)
    assert f"{largest} tokens per rank" in text


def test_more_rows_than_row_numbers_is_refused() -> None:
    with pytest.raises(CapacityError, match="2147483647"):
        receive_layout(2**31, 16, 2, 0, 0)


@pytest.mark.parametrize(
    "arguments", [(-1, 8, 2, 0, 0), (1, 0, 2, 0, 0), (1, 8, 3, 0, 0), (1, 8, 2, -1, 0)]
)
def test_impossible_inputs_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        receive_layout(*arguments)


def test_free_memory_is_what_linux_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_host_bytes(meminfo) == 0
    meminfo.write_text("MemTotal: 32 kB\nMemAvailable:    7 kB\n")
    assert free_host_bytes(meminfo) == 7 * 1024
    meminfo.write_text("MemTotal: 32 kB\n")
    assert free_host_bytes(meminfo) == 0
